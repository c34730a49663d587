"""Weights of experts whose tiles of 64 x 64 numbers lie together in memory, one behind the other along a row of them.

A kernel that takes 64 rows of a matrix, as ``wgmma`` does, and 64 columns of them at a time reads pieces of 128 bytes
that are a row's length apart. Where they are 8 KB in one piece steps of 24 to 1,024 requests take 1.4 to 2.2% less on
an H100, 0.6 to 1.4% on an H200, where one request took 1% longer by the tiles that it had then. Loaders know nothing of
it: numbers are moved once all are there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from atom_core.kernels.experts import ExpertWeights

#: Rows and columns of a tile.
SIZE = 64
#: The same for kernels; where tiles lie together, a row's tiles are as many times as far apart as their columns are.
FAR = tl.constexpr(SIZE)


def of_whole_tiles(layer: ExpertWeights) -> bool:
    """Whether a layer's weights are in 16 bits and made of whole tiles: of gates, of ups, and of down."""
    hidden, size = layer.down.shape[1:]
    return layer.down.itemsize == layer.gate_up.itemsize == 2 and hidden % SIZE == size % SIZE == 0


def tile_in_place(weight: torch.Tensor) -> None:
    """Move the numbers of each matrix of ``weight [E, N, K]``, contiguous, into the order of its tiles."""
    for matrix in weight:
        rows, columns = matrix.shape
        tiled = matrix.view(rows // SIZE, SIZE, columns // SIZE, SIZE).transpose(1, 2).contiguous()
        matrix.view(-1).copy_(tiled.view(-1))


def untile_in_place(weight: torch.Tensor) -> None:
    """Undo :func:`tile_in_place`."""
    for matrix in weight:
        rows, columns = matrix.shape
        plain = matrix.view(rows // SIZE, columns // SIZE, SIZE, SIZE).transpose(1, 2).contiguous()
        matrix.view(-1).copy_(plain.view(-1))


@triton.jit
def row_at(row, K, TILED: tl.constexpr):
    """Where rows of a matrix of ``K`` columns begin, or of matrices behind one another."""
    return row // FAR * (K * FAR) + row % FAR * FAR if TILED else row * K


@triton.jit
def column_at(column, TILED: tl.constexpr):
    """How far columns are behind where their row begins."""
    return column // FAR * (FAR * FAR) + column % FAR if TILED else column
