"""Where the bits of four numbers in MXFP4 lie within two bytes, for Hopper's kernel.

A checkpoint has them one behind the other, four bits each. bfloat16 has a sign in bit 15, and what e2m1 has besides it
in bits 8 to 6. So the first number is there already, and the second by one shift; the other two take two.
"""

from __future__ import annotations

import torch

#: Of each number, from the first: where its sign is, and the lowest of the three bits behind it.
PLACES = ((15, 6), (12, 3), (13, 0), (14, 9))


def spread(blocks: torch.Tensor) -> None:
    """Move the bits of ``blocks``, uint8 ``[E, rows, columns / 2]`` and contiguous, in place, an expert at a time."""
    for expert in blocks.view(torch.int16):
        moved = torch.zeros_like(expert)
        for index, (sign, size) in enumerate(PLACES):
            number = expert >> 4 * index
            moved |= (number >> 3 & 1) << sign
            moved |= (number & 7) << size
        expert.copy_(moved)


def gather(blocks: torch.Tensor) -> None:
    """Undo :func:`spread`."""
    for expert in blocks.view(torch.int16):
        moved = torch.zeros_like(expert)
        for index, (sign, size) in enumerate(PLACES):
            moved |= ((expert >> sign & 1) << 3 | expert >> size & 7) << 4 * index
        expert.copy_(moved)
