"""The product of few rows for Hopper, whose arithmetic is run on a CPU: see :mod:`tests.gluon_on_cpu`."""

from __future__ import annotations

import pytest
import torch

from atom_core.kernels.gated_activation.reference import gated_activation
from atom_core.kernels.linear import triton_kernel
from atom_core.kernels.linear.tiles import Tile, tile_for
from atom_core.kernels.normed_linear import Operands
from atom_core.kernels.normed_linear import triton_kernel as normed_kernel
from atom_core.kernels.rms_norm.reference import rms_norm
from tests.gluon_on_cpu import on_cpu

DTYPE = torch.float16


@pytest.fixture
def product(monkeypatch):
    """``product`` with the kernel as a CPU runs it."""
    with on_cpu() as modules:
        found = modules["atom_core.kernels.linear.few_rows_hopper"]
        monkeypatch.setitem(triton_kernel._KERNELS, "hopper", found.few_rows_hopper)
        monkeypatch.setattr(triton_kernel, "LAG", found.LAG, raising=False)
        yield triton_kernel.product


def operands(rows, out_features, in_features):
    torch.manual_seed(0)
    wide = torch.full((rows, in_features + 16), torch.nan, dtype=DTYPE)
    wide[:, :in_features] = torch.randn(rows, in_features)
    weight = (torch.randn(out_features, in_features) / in_features**0.5).to(DTYPE)
    return wide[:, :in_features], weight, torch.randn(out_features).to(DTYPE)


@pytest.mark.parametrize("rows", [1, 3, 8, 9, 16])
@pytest.mark.parametrize("split", [1, 2, 4])
@pytest.mark.parametrize("with_residual", [False, True])
def test_parts_side_by_side_are_summed_up(product, rows, split, with_residual):
    x, weight, bias = operands(rows, 100, 1024)
    residual = torch.randn(rows, 100).to(DTYPE) if with_residual else None
    wanted = x.double() @ weight.double().T + bias.double() + (0 if residual is None else residual.double())
    tile = Tile("hopper", 64 // split, 64, 4, 5, split=split)
    found = product(x, weight, bias, tile=tile, overlap=False, residual=residual)
    torch.testing.assert_close(found.double(), wanted, rtol=2**-9, atol=2**-9)


def test_numbers_of_other_parts_may_be_anything(product):
    x, weight = (torch.zeros(rows, 512, dtype=torch.bfloat16) for rows in (2, 32))
    # Half of the one times the other half of the other is infinite.
    x[:, :256], weight[:, 256:] = 1e30, 1e30
    tile = Tile("hopper", 32, 128, 4, 4, split=2)
    assert torch.equal(product(x, weight, None, tile=tile, overlap=False), torch.zeros(2, 32, dtype=x.dtype))


def test_gates_are_activated_without_parts(monkeypatch):
    launched = {}

    class Recorder:
        def __getitem__(self, grid):
            return lambda *arguments, **constants: launched.update(constants, grid=grid)

    monkeypatch.setitem(triton_kernel._KERNELS, "hopper", Recorder())
    monkeypatch.setattr(triton_kernel, "LAG", 2, raising=False)
    x, weight, _ = operands(3, 1024, 2048)
    tile = Tile("hopper", 16, 128, 4, 6, split=4)
    triton_kernel.product(x, weight, None, tile=tile, overlap=False, activation="silu")
    assert (launched["BLOCK_N"], launched["SPLIT"], launched["STAGES"], launched["grid"]) == (64, 1, 6, (16, 1))


@pytest.mark.parametrize(("out_features", "in_features"), [(1024, 2048), (2048, 2048), (1024, 3072), (96, 512)])
@pytest.mark.parametrize("rows", [2, 16])
def test_default_tiles_of_narrow_weights(product, rows, out_features, in_features):
    tile = tile_for(rows, out_features, in_features, 2, nvidia=True, hopper=True)
    assert tile is not None
    assert tile.split > 1
    x, weight, bias = operands(rows, out_features, in_features)
    found = product(x, weight, bias, tile=tile, overlap=False)
    torch.testing.assert_close(found.double(), x.double() @ weight.double().T + bias.double(), rtol=2**-9, atol=2**-8)


@pytest.mark.parametrize("rows", [17, 40, 200])
def test_more_rows_by_a_router_are_multiplied_in_parts_as_well(product, rows):
    tile = tile_for(rows, 96, 1024, 2, nvidia=True, hopper=True)
    assert tile is not None
    assert (tile.split, tile.tokens) == (4, 16)
    x, weight, bias = operands(rows, 96, 1024)
    found = product(x, weight, bias, tile=tile, overlap=False)
    torch.testing.assert_close(found.double(), x.double() @ weight.double().T + bias.double(), rtol=2**-9, atol=2**-8)


@pytest.mark.parametrize(("out_features", "in_features"), [(4096, 1024), (1152, 4096), (1024, 2560)])
@pytest.mark.parametrize("around", ["bias", "residual", "norm and activation"])
def test_one_row_by_a_large_weight(product, monkeypatch, around, out_features, in_features):
    tile = tile_for(1, out_features, in_features, 2, nvidia=True, hopper=True)
    assert tile is not None
    assert tile.kernel == "hopper"
    x, weight, bias = operands(1, out_features, in_features)
    if around == "bias":
        found = product(x, weight, bias, tile=tile, overlap=False)
        expected = x.double() @ weight.double().T + bias.double()
    elif around == "residual":
        residual = torch.randn(1, out_features).to(x.dtype)
        expected = residual.double() + x.double() @ weight.double().T
        found = product(x, weight, None, tile=tile, overlap=False, residual=residual)
        assert found is residual
    else:
        monkeypatch.setattr(normed_kernel, "chosen_tile", lambda *_: tile)
        norm = torch.rand(in_features).to(x.dtype)
        normed = normed_kernel.TritonNormedLinear("silu", nvidia=True, overlap=False)
        found = normed(x, norm, 1e-6, Operands(weight, None))
        product_of_normed = rms_norm(x, norm, 1e-6, None)[0].double() @ weight.double().T
        expected = gated_activation(product_of_normed, "silu")
    torch.testing.assert_close(found.double(), expected, rtol=2**-8, atol=2**-8)
