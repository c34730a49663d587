"""How Hopper's experts in MXFP4 keep weights and read inputs: what is summed up is the product they stand for."""

from __future__ import annotations

import pytest
import torch

from atom_core.kernels.linear.triton_kernel import Norm
from atom_core.kernels.mxfp4_experts.packing import FACTOR, pack, split
from atom_core.kernels.mxfp4_linear.inputs import prepare
from atom_core.kernels.mxfp4_linear.reference import dequantize
from tests.unit.core.kernels.test_mxfp4_linear import operands

pytestmark = pytest.mark.usefixtures("exact_fp8_casts")

#: (K, N): an even and an odd number of groups, one pair, and one group.
SIZES = [(288, 16), (320, 8), (64, 16), (32, 8)]
every_size = pytest.mark.parametrize("sizes", SIZES, ids=str)


def planes(blocks):
    """As the kernel turns bytes into two numbers of e4m3 each: float64 ``[2, N, K / 2]``."""
    first = blocks & 0x9C
    second = (((blocks << 2) & 0x8C) | ((blocks >> 2) & 0x73)) & 0x9C
    return torch.stack((first, second)).view(torch.float8_e4m3fn).double() * FACTOR


def product(blocks, scales, numbers):
    """``[T, N]``: sums of 32 bytes' first numbers, and of their second ones, each by its group's scale."""
    rows, size = blocks.shape
    spans = -(-size // 32)
    weight = torch.zeros(2, rows, spans * 32, dtype=torch.float64)
    weight[:, :, :size] = planes(blocks)
    weight = weight.view(2, rows, spans, 32).permute(2, 0, 1, 3).reshape(2 * spans, rows, 32)
    each = scales[:, torch.arange(2 * spans).clamp(max=scales.shape[1] - 1)].double()
    return torch.einsum("gnj,tgpj,ng->tn", weight, numbers, 2.0 ** (each - 127))


@every_size
def test_a_product_of_packed_weights_is_the_one_they_stand_for(sizes):
    size, rows = sizes
    x, blocks, scales, _ = operands(5, torch.bfloat16, size, rows)
    wanted = x.double() @ dequantize(blocks, scales, torch.float64).T
    packed = blocks[None].clone()
    pack(packed)
    numbers, by = split(x, False, rounds=False)
    found = product(packed[0], scales, numbers.double()) * by.double()[:, None]
    torch.testing.assert_close(found, wanted, rtol=0, atol=2**-16 * wanted.abs().max().item())


@pytest.mark.parametrize("size", [96, 1056, 2880])
@pytest.mark.parametrize("rounds", [False, True], ids=["as they are", "rounded"])
@pytest.mark.parametrize("normed", [False, True], ids=["alone", "normed"])
def test_inputs_are_their_two_parts_but_for_a_trace(size, rounds, normed):
    x = operands(4, torch.bfloat16, size)[0]
    x[1] = 0
    norm = Norm(torch.rand(size).to(x.dtype) + 0.5, 1e-6) if normed else None
    numbers, by = split(x, False, rounds=rounds, norm=norm)
    wanted = prepare(x, False, rounds=rounds, parts=1, norm=norm).double()
    groups = size // 32
    found = numbers.double().sum(2) * by.double()[:, None, None]
    if groups % 2:
        halves = found[:, -2:, :16].reshape(len(x), 1, 32)
        assert not found[:, -2:, 16:].any()
        found = torch.cat((found[:, :-2], halves), 1)
    largest = wanted.abs().amax(1, keepdim=True)
    assert ((found.reshape(len(x), size) - wanted).abs() <= largest * 2.0**-17).all()


def test_rows_of_any_size_have_a_scale():
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x *= torch.tensor([1e-35, 1.0, 1e37], dtype=torch.float64)[:, None]
    numbers, by = split(x.bfloat16(), False, rounds=False)
    found = numbers.double().sum(2).reshape(3, 64) * by.double()[:, None]
    torch.testing.assert_close(found, x.bfloat16().double(), rtol=2**-9, atol=1e-40)


@pytest.mark.parametrize("number", ["nan", "inf"])
def test_a_row_that_is_not_finite_is_nan(number):
    x = torch.ones(2, 64, dtype=torch.bfloat16)
    x[0, 3] = float(number)
    numbers, by = split(x, False, rounds=False)
    assert by.isnan().tolist() == [True, False]
    assert (numbers[1].double().sum(1) * by[1].item()).eq(1).all()


def test_rows_that_are_no_slots_are_left_out():
    x, slots = operands(4, torch.bfloat16)[0], torch.tensor([3, -1, 0, -1], dtype=torch.int32)
    found, wanted = split(x, False, rounds=False, slots=slots), split(x, False, rounds=False)
    for some, all_of_them in zip(found, wanted, strict=True):
        assert torch.equal(some[[0, 2]].float(), all_of_them[[0, 2]].float())
