"""The product of few rows by FP8 blocks for Hopper, whose arithmetic is run on a CPU: see :mod:`tests.gluon_on_cpu`."""

from __future__ import annotations

import sys

import pytest
import torch

from atom_core.batch import BatchShape
from atom_core.kernels.fp8_block_linear import few_rows, triton_kernel
from atom_core.kernels.fp8_block_linear.few_rows import multiply_few_rows, takes_more
from atom_core.kernels.fp8_block_linear.hopper_tiles import BlockTile, SpecializedTile, tile_for
from atom_core.kernels.fp8_linear.reference import E4M3
from atom_core.kernels.gated_activation.reference import gated_activation
from atom_core.kernels.select import Target
from tests.gluon_on_cpu import on_cpu

MODULES = [f"atom_core.kernels.fp8_block_linear.{name}_hopper" for name in ("few_rows", "specialized")]
#: Of a multiprocessor, in bytes.
SHARED = 227 * 1024


@pytest.fixture
def multiply(monkeypatch):
    """:func:`multiply_few_rows` with the kernel as a CPU runs it."""
    with on_cpu() as modules:
        for module in MODULES:
            monkeypatch.setitem(sys.modules, module, modules[module])
        monkeypatch.setattr(few_rows, "on_hopper", lambda device: True)
        yield lambda *given, **options: multiply_few_rows(
            *given, nvidia=True, overlap=False, dtype=torch.float16, **options
        )


def operands(rows, out_features, in_features):
    """In FP8, with scales of groups and blocks that differ by up to 16 times, and a bias."""
    generator = torch.Generator().manual_seed(0)
    groups, blocks = in_features // 128, -(-out_features // 128)
    x, weight = (
        (30 * torch.randn(size, in_features, generator=generator)).clamp(-448, 448).to(E4M3)
        for size in (rows, out_features)
    )
    of_x = torch.exp2(4 * torch.rand(groups, rows, generator=generator)) * 1e-3
    of_weight = torch.exp2(4 * torch.rand(blocks, groups, generator=generator)) * 1e-3
    return x, of_x, weight, of_weight, torch.randn(out_features, generator=generator).half()


def by_definition(x, of_x, weight, of_weight, bias):
    """float64."""
    left = x.double() * of_x.double().T.repeat_interleave(128, 1)
    right = weight.double() * of_weight.double().repeat_interleave(128, 0)[: len(weight)].repeat_interleave(128, 1)
    return left @ right.T + bias.double()


def assert_close(found, wanted):
    torch.testing.assert_close(found.double(), wanted, rtol=2**-9, atol=2**-9 * wanted.abs().max().item())


#: (N, K): a last tile that is not full; fewer steps than warp groups or than stages, and numbers that neither divides.
SIZES = [(2048, 1024), (200, 512), (2112, 1408), (48, 256), (128, 128), (128, 2560)]


@pytest.mark.parametrize("rows", [2, 8, 16, 17, 32, 33, 64])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_it_multiplies(multiply, size, rows):
    given = operands(rows, *size)
    assert_close(multiply(*given), by_definition(*given))


@pytest.mark.parametrize(
    ("rows", "size"),
    [(2, (8512, 1664)), (17, (8512, 1664)), (64, (8512, 128)), (8, (16960, 256)), (64, (25408, 384))],
    ids=str,
)
def test_it_multiplies_by_so_many_outputs_that_programs_share_a_multiprocessor(multiply, rows, size):
    given = operands(rows, *size)
    assert isinstance(tile_for(rows, size[0], False), BlockTile)
    assert_close(multiply(*given), by_definition(*given))


@pytest.mark.parametrize(("rows", "size"), [(65, (4096, 512)), (130, (2048, 384)), (256, (2112, 512))], ids=str)
def test_it_multiplies_more_rows_where_its_programs_run_at_once(multiply, size, rows):
    given = operands(rows, *size)
    assert_close(multiply(*given), by_definition(*given))


@pytest.mark.usefixtures("multiply")
@pytest.mark.parametrize(
    ("rows", "size", "tokens"),
    [
        (192, (2816, 2560), 64),
        (129, (2304, 2560), 64),
        (65, (4096, 2048), 64),
        (128, (4096, 2048), 64),
        (129, (4096, 2048), None),
        (128, (2048, 4096), 32),
        (129, (2048, 4096), 64),
        (256, (2048, 4096), 64),
        (257, (2048, 4096), None),
        (256, (2112, 512), 64),
        (256, (2176, 512), None),
        (72, (12288, 2048), None),
        (72, (2048, 448), None),
    ],
    ids=str,
)
def test_which_rows_it_takes(rows, size, tokens):
    assert takes_more(rows, torch.empty(size, dtype=E4M3)) == (tokens is not None)
    if tokens is not None:
        assert tile_for(rows, size[0], False) == SpecializedTile(tokens)


@pytest.mark.parametrize("size", [(2048, 1024), (192, 256)], ids=str)
def test_it_adds_to_a_residual(multiply, size):
    given = operands(5, *size)
    residual = torch.randn(5, size[0]).half()
    wanted = by_definition(*given) + residual.double()
    assert multiply(*given, residual=residual) is residual
    assert_close(residual, wanted)


def test_it_activates_gates(multiply):
    given = operands(3, 512, 512)
    # Values as a gate has them.
    given = (given[0], given[1] * 1e-3, *given[2:])
    assert_close(multiply(*given, activation="silu"), gated_activation(by_definition(*given), "silu"))


@pytest.mark.parametrize("activated", [False, True])
def test_rows_with_one_compile_key_have_one_tile(monkeypatch, activated):
    monkeypatch.setattr(triton_kernel, "on_hopper", lambda device: True)
    kernel = triton_kernel.TritonFp8BlockLinear(Target("cuda", "sm90"), True, torch.bfloat16)
    cpu = torch.device("cpu")
    keys = [tuple(kernel.compile_keys(BatchShape((1,) * rows, 64), cpu)) for rows in range(1, 257)]
    for outputs in range(64, 40000, 320):
        tiles = [tile_for(rows, outputs, activated) for rows in range(1, 257)]
        # One row has a kernel of its own.
        assert len(set(zip(keys[1:], tiles[1:], strict=True))) == len(set(keys[1:]))


@pytest.mark.parametrize(
    ("rows", "outputs", "tokens"),
    [(2, 64, 8), (9, 2112, 16), (32, 8448, 32), (33, 2112, 32), (64, 2112, 32), (33, 2176, 64), (64, 8448, 64)],
    ids=str,
)
def test_tiles_of_specialised_warps(rows, outputs, tokens):
    assert tile_for(rows, outputs, False) == SpecializedTile(tokens)


@pytest.mark.parametrize(
    ("rows", "outputs", "activated", "tokens", "together"),
    [
        (8, 2048, True, 8, 1),
        (64, 8448, True, 64, 1),
        (16, 9216, False, 16, 2),
        (16, 12288, False, 16, 2),
        (64, 12288, False, 64, 2),
        (2, 24576, True, 8, 3),
        (32, 24576, False, 32, 3),
        (64, 24576, True, 64, 3),
        (16, 36864, True, 16, 4),
        (64, 36864, True, 64, 2),
    ],
    ids=str,
)
def test_tiles_of_programs_that_share_a_multiprocessor(rows, outputs, activated, tokens, together):
    tile = tile_for(rows, outputs, activated)
    assert isinstance(tile, BlockTile)
    assert tile.tokens == tokens
    assert tile.stages % tile.turn == 0
    assert tile.stages >= 2 * tile.turn
    # With the scales.
    assert together * tile.stages * (64 + tokens) * (128 + 4) <= SHARED
