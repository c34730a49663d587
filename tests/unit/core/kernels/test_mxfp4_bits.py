"""Where bits of MXFP4 are moved to for Hopper's kernel, and that the same numbers are read there."""

from __future__ import annotations

import torch

from atom_core.kernels.mxfp4_experts import empty_scales
from atom_core.kernels.mxfp4_experts.bits import PLACES, spread
from atom_core.kernels.mxfp4_linear.reference import dequantize


def packed(count, rows, columns):
    return torch.randint(256, (count, rows, columns // 2), dtype=torch.uint8)


def test_no_bit_is_lost_and_each_has_one_place():
    taken = [place for sign, size in PLACES for place in (sign, size, size + 1, size + 2)]
    assert sorted(taken) == list(range(16))
    blocks = packed(2, 3, 64)
    before = blocks.view(torch.int16).int() & 0xFFFF
    address = blocks.data_ptr()
    spread(blocks)
    assert blocks.data_ptr() == address
    after = blocks.view(torch.int16).int() & 0xFFFF
    for index, (sign, size) in enumerate(PLACES):
        number = (after >> sign & 1) << 3 | after >> size & 7
        assert torch.equal(number, before >> 4 * index & 15)


def test_the_places_are_those_of_bfloat16_and_what_shifts_take_there():
    (first, second, third, fourth) = PLACES
    assert first == (15, 6)
    assert second == (15 - 3, 6 - 3)
    assert third == (15 - 2, 6 - 6)
    assert fourth == (15 - 1, 6 + 3)


def test_wide_numbers_are_those_of_the_checkpoint():
    from atom_core.kernels.mxfp4_experts.many_tokens import widen

    blocks, scales = packed(2, 20, 544), empty_scales(2, 20, 544)
    scales.copy_(torch.randint(120, 130, scales.shape, dtype=torch.uint8))
    expected = dequantize(blocks, scales, torch.bfloat16)
    spread(blocks)
    assert torch.equal(widen(blocks, scales, torch.bfloat16), expected)
