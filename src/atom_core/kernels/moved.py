"""Weights whose elements a kernel has moved within their memory, and how to move them back.

A partial weight update needs the rest of a layer in the order in which it was loaded. The function that moves the
elements may be a library's and have no inverse. It has to move elements only, and change none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, runtime_checkable

import torch

_INTEGERS = {1: torch.uint8, 2: torch.int16}


@runtime_checkable
class MovingKernel(Protocol):
    """A kernel that moves the elements of the weights that it adopts, in place."""

    def move_back(self, *weights: torch.Tensor) -> None:
        """Move the elements of adopted ``weights [.., N, K]`` back to the order of loading, in place."""


def move_back(weight: torch.Tensor, move: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Undo ``move`` in each matrix of ``weight [.., N, K]``: contiguous, with elements of one or two bytes.

    Args:
        weight: the moved elements; written to.
        move: the function that moved them, from one matrix to another of the same size. Finding out where it moves each
            element needs about 16 bytes of memory for each element of one matrix.
    """
    matrices = weight.view(-1, *weight.shape[-2:])
    if not len(matrices):
        return
    came_from = _origins(matrices[0], move)
    for matrix in matrices:
        elements = matrix.view(_INTEGERS[matrix.itemsize]).view(-1)
        elements.copy_(torch.empty_like(elements).scatter_(0, came_from, elements))


def _origins(matrix: torch.Tensor, move: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """The index in ``matrix`` of each element of ``move(matrix)``, int64."""
    kind, count = _INTEGERS[matrix.itemsize], matrix.numel()
    places = torch.arange(count, device=matrix.device)
    found = torch.zeros_like(places)
    for shift in range(0, max(1, (count - 1).bit_length()), 8):
        byte = (places >> shift & 0xFF).to(kind).view(matrix.shape).view(matrix.dtype)
        moved = move(byte).contiguous().view(-1).view(kind).long()
        found |= moved << shift
    return found
