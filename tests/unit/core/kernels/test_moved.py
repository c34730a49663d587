"""Weights that a kernel has moved come back as they were loaded."""

from __future__ import annotations

import pytest
import torch

from atom_core.kernels.moved import move_back
from atom_core.kernels.mxfp4_experts.bits import gather, spread


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.uint8], ids=str)
@pytest.mark.parametrize("shape", [(3, 4), (2, 48, 64), (5, 300, 7), (0, 4, 4)], ids=str)
def test_any_order_is_undone(shape, dtype):
    order = torch.randperm(shape[-1] * shape[-2])
    weight = torch.randint(0, 120, shape).to(torch.uint8 if dtype.itemsize == 1 else torch.int16).view(dtype)

    def move(matrix):
        return matrix.reshape(-1).view(torch.uint8 if matrix.itemsize == 1 else torch.int16)[order].view(dtype)

    moved = weight.clone()
    for matrix in moved.view(-1, *shape[-2:]):
        matrix.copy_(move(matrix.clone()).view(matrix.shape))
    move_back(moved, move)
    assert torch.equal(moved.view(torch.uint8), weight.view(torch.uint8))


def test_bits_that_are_spread_are_gathered():
    blocks = torch.randint(0, 256, (3, 16, 64), dtype=torch.uint8)
    moved = blocks.clone()
    spread(moved)
    assert not torch.equal(moved, blocks)
    gather(moved)
    assert torch.equal(moved, blocks)


def test_tiles_are_laid_out_in_rows_again():
    from atom_core.kernels.experts import blocked_layout

    weight = torch.randn(3, 128, 192, dtype=torch.bfloat16)
    moved = weight.clone()
    blocked_layout.to_blocked_layout(moved)
    assert not torch.equal(moved, weight)
    blocked_layout.from_blocked_layout(moved)
    assert torch.equal(moved, weight)
