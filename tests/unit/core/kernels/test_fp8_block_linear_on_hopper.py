"""The product of few rows by FP8 blocks for Hopper, whose arithmetic is run on a CPU: see :mod:`tests.gluon_on_cpu`."""

from __future__ import annotations

import sys

import pytest
import torch

from atom_core.kernels.fp8_block_linear import few_rows
from atom_core.kernels.fp8_block_linear.few_rows import hopper_tile, input_rows, multiply_few_rows, takes_more
from atom_core.kernels.fp8_linear.reference import E4M3
from atom_core.kernels.gated_activation.reference import gated_activation
from tests.gluon_on_cpu import on_cpu

MODULE = "atom_core.kernels.fp8_block_linear.few_rows_hopper"
#: Of a multiprocessor, in bytes.
SHARED = 227 * 1024


@pytest.fixture
def multiply(monkeypatch):
    """:func:`multiply_few_rows` with the kernel as a CPU runs it."""
    with on_cpu() as modules:
        monkeypatch.setitem(sys.modules, MODULE, modules[MODULE])
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


#: (N, K): outputs split four and two times, once; a last tile that is not full; inputs that only two parts divide.
SIZES = [(2048, 1024), (4096, 512), (2112, 512), (200, 512), (128, 256), (128, 384)]


@pytest.mark.parametrize("rows", [2, 8, 16, 17, 32, 33, 64])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_it_multiplies(multiply, size, rows):
    given = operands(rows, *size)
    assert_close(multiply(*given), by_definition(*given))


@pytest.mark.parametrize(("rows", "size"), [(65, (4096, 512)), (130, (2048, 384)), (256, (2112, 512))], ids=str)
def test_it_multiplies_more_rows_where_its_programs_run_at_once(multiply, size, rows):
    given = operands(rows, *size)
    assert_close(multiply(*given), by_definition(*given))


@pytest.mark.usefixtures("multiply")
@pytest.mark.parametrize(
    ("rows", "size", "takes"),
    [
        (192, (2816, 2560), True),
        (129, (2304, 2560), True),
        (65, (4096, 2048), True),
        (128, (4096, 2048), True),
        (129, (4096, 2048), False),
        (256, (2048, 4096), True),
        (257, (2048, 4096), False),
        (256, (2112, 512), True),
        (256, (2176, 512), False),
        (72, (12288, 2048), False),
        (72, (2048, 448), False),
    ],
    ids=str,
)
def test_which_rows_it_takes(rows, size, takes):
    assert takes_more(rows, torch.empty(size, dtype=E4M3)) == takes
    if takes:
        tile = hopper_tile(input_rows(rows), *size)
        assert (tile.tokens, tile.split) == (64, 1)
        assert tile.stages == min(10, size[1] // 128 + 1)


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


def test_scales_of_other_parts_may_be_anything(multiply):
    x, of_x, weight, of_weight, _ = operands(2, 2048, 1024)
    no_bias = torch.zeros(2048).half()
    # Half of the one times the other half of the other is infinite.
    x[:, 512:], weight[:, :512] = 0, 0
    of_x[:4], of_weight[:, 4:] = 1e30, 1e30
    assert torch.equal(multiply(x, of_x, weight, of_weight, no_bias), torch.zeros(2, 2048).half())


@pytest.mark.parametrize(
    ("rows", "size", "split", "tokens", "together"),
    [
        (16, (2048, 4096), 4, 16, 1),
        (16, (2048, 384), 1, 16, 1),
        (16, (2048, 768), 2, 16, 1),
        (64, (2048, 384), 1, 32, 1),
        (16, (4096, 4096), 2, 16, 1),
        (16, (8448, 2048), 1, 16, 1),
        (16, (9216, 2048), 1, 16, 2),
        (16, (12288, 2048), 1, 16, 2),
        (16, (24576, 4096), 1, 16, 1),
        (32, (2048, 4096), 4, 16, 2),
        (32, (4096, 4096), 1, 32, 1),
        (64, (2048, 4096), 2, 32, 1),
        (64, (4096, 4096), 1, 64, 1),
        (64, (12288, 2048), 1, 64, 2),
    ],
    ids=str,
)
def test_tiles(rows, size, split, tokens, together):
    tile = hopper_tile(rows, *size)
    stage = (64 + split * tokens) * (128 + 4)
    assert (tile.split, tile.tokens) == (split, tokens)
    assert tile.rows * tile.split == 64
    assert together * tile.stages * stage <= SHARED
    # So many tiles as there are, or as fit, but for 64 rows that are shared out.
    most, steps = 8 if (rows, tokens) == (64, 32) else 20, size[1] // 128 // split
    assert tile.stages == min(most, steps + 1) or (together + 0.5) * (tile.stages + 1) * stage > SHARED
    assert hopper_tile(rows, *size, "silu").split == 1
