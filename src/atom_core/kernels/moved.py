"""Weights whose numbers a kernel has moved within their memory, and the way back.

A layer that is to be written to in part needs the rest as it was loaded. What moves numbers may be a library's, which
has no inverse; that it moves them, and changes none, is all that has to be known of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, runtime_checkable

import torch

_INTEGERS = {1: torch.uint8, 2: torch.int16}


@runtime_checkable
class MovingKernel(Protocol):
    """A kernel that moves the numbers of weights that it adopts, in place."""

    def move_back(self, *weights: torch.Tensor) -> None:
        """Bring adopted ``weights [.., N, K]`` into the order in which they are loaded, in place."""


def move_back(weight: torch.Tensor, move: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Undo ``move`` in each matrix of ``weight [.., N, K]``, contiguous, of one or two bytes a number.

    Args:
        weight: the moved numbers; written to.
        move: what had moved them, from one matrix to another of as many numbers. It is asked where it moves each, for
            which some 16 bytes a number of one matrix are needed on the way.
    """
    matrices = weight.view(-1, *weight.shape[-2:])
    if not len(matrices):
        return
    came_from = _origins(matrices[0], move)
    for matrix in matrices:
        numbers = matrix.view(_INTEGERS[matrix.itemsize]).view(-1)
        numbers.copy_(torch.empty_like(numbers).scatter_(0, came_from, numbers))


def _origins(matrix: torch.Tensor, move: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Of each number that ``move`` gives for ``matrix``, its place before, int64."""
    kind, count = _INTEGERS[matrix.itemsize], matrix.numel()
    places = torch.arange(count, device=matrix.device)
    found = torch.zeros_like(places)
    for shift in range(0, max(1, (count - 1).bit_length()), 8):
        byte = (places >> shift & 0xFF).to(kind).view(matrix.shape).view(matrix.dtype)
        moved = move(byte).contiguous().view(-1).view(kind).long()
        found |= moved << shift
    return found
