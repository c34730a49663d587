"""Order of the bits of four MXFP4 values within two bytes for the Hopper kernel.

Checkpoints store them in sequence, four bits each. In bfloat16 the sign is bit 15, and the other bits of e2m1 belong to
bits 8 to 6. In this order the first value is in place already, the second needs one shift, and the others need two.
"""

from __future__ import annotations

import torch

#: For each value: the bit of its sign, and the lowest of its other three bits.
PLACES = ((15, 6), (12, 3), (13, 0), (14, 9))


def spread(blocks: torch.Tensor) -> None:
    """Reorder the bits of ``blocks``, uint8 ``[E, rows, columns / 2]`` and contiguous, in place."""
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
