"""Products of few rows in Triton, where the time is that of reading the weight once.

One row: a program takes some rows of the weight and multiplies number by number; what it has summed is summed up at the
end. Up to 16 rows: tiles of the weight are the left side of a matrix product, because its instructions want many rows
there and few on the right. More rows are torch's.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from atom_core.kernels.opaque import opaque
from atom_core.kernels.triton_support import launch_options

#: Rows from which on torch's product is used.
MAX_ROWS = 16


@triton.jit
def _one_row(
    x,
    weight,
    bias,
    y,
    N,
    K,
    stride_weight,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    column = tl.arange(0, BLOCK_K)
    # Rows past the last are the last again, and are not stored.
    at = weight + tl.minimum(row, N - 1).to(tl.int64)[:, None] * stride_weight + column[None, :]
    # The first tile of the weight is on its way before x is there.
    known = column < K
    tile = tl.load(at, mask=known[None, :], other=0.0, eviction_policy="evict_first")
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    given = tl.load(x + column, mask=known, other=0.0)
    sums = tile.to(tl.float32) * given.to(tl.float32)[None, :]
    for begin in tl.range(BLOCK_K, K, BLOCK_K):
        if EVEN:
            tile = tl.load(at + begin, eviction_policy="evict_first")
            given = tl.load(x + begin + column)
        else:
            known = begin + column < K
            tile = tl.load(at + begin, mask=known[None, :], other=0.0, eviction_policy="evict_first")
            given = tl.load(x + begin + column, mask=known, other=0.0)
        sums += tile.to(tl.float32) * given.to(tl.float32)[None, :]
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
    total = tl.sum(sums, 1)
    if HAS_BIAS:
        total += tl.load(bias + row, mask=row < N, other=0.0).to(tl.float32)
    tl.store(y + row, total.to(y.dtype.element_ty), mask=row < N)


@triton.jit
def _few_rows(
    x,
    weight,
    bias,
    y,
    M,
    N,
    K,
    stride_x,
    stride_weight,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    OVERLAP: tl.constexpr,
    STAGES: tl.constexpr,
):
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    column = tl.arange(0, BLOCK_K)
    given = tl.arange(0, BLOCK_M)
    at = weight + tl.minimum(row, N - 1).to(tl.int64)[:, None] * stride_weight + column[None, :]
    x_at = x + given.to(tl.int64)[None, :] * stride_x + column[:, None]
    used = given[None, :] < M
    total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    for begin in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        if EVEN:
            tile = tl.load(at + begin, eviction_policy="evict_first")
            right = tl.load(x_at + begin, mask=used, other=0.0)
        else:
            known = begin + column < K
            tile = tl.load(at + begin, mask=known[None, :], other=0.0, eviction_policy="evict_first")
            right = tl.load(x_at + begin, mask=used & known[:, None], other=0.0)
        total = tl.dot(tile, right, total)
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
    if HAS_BIAS:
        total += tl.load(bias + row, mask=row < N, other=0.0).to(tl.float32)[:, None]
    y_at = y + given.to(tl.int64)[None, :] * N + row[:, None]
    tl.store(y_at, total.to(y.dtype.element_ty), mask=used & (row[:, None] < N))


@dataclass(frozen=True)
class Tile:
    """What one program takes: rows and columns of the weight at a time, and how many such tiles are on their way."""

    rows: int
    columns: int
    warps: int
    stages: int


#: Weights with as many rows keep every processor busy with whole tiles, also for one row of x.
_MANY = 65536


def tile_for(num_rows: int, out_features: int, in_features: int, nvidia: bool) -> Tile:
    """The tile of a product; on an H200 within a few per cent of the best of 40 for the shapes of Qwen3 0.6B and 8B."""
    if takes_one_row(num_rows, out_features):
        return Tile(4, 1024, 4, 1)
    if not nvidia:
        return Tile(32, 256, 4, 2)
    if out_features >= 6144:
        return Tile(64, 128, 4, 5 if out_features < _MANY else 3)
    return Tile(32, 256, 4, 5) if in_features <= 4096 else Tile(32, 512, 4, 3)


def takes_one_row(num_rows: int, out_features: int) -> bool:
    """Whether the kernel for one row is used."""
    return num_rows == 1 and out_features < _MANY


class TritonLinear:
    """See :mod:`atom_core.kernels.linear`.

    Args:
        nvidia: whether the device is one of NVIDIA's; others have less shared memory.
        overlap: see :func:`atom_core.kernels.triton_support.overlaps`.
    """

    def __init__(self, nvidia: bool, overlap: bool) -> None:
        self.nvidia, self.overlap = nvidia, overlap

    def adopt(self, weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
        """It reads the weight as it is."""
        return False

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """``x [T, in]`` to ``[T, out]``."""
        return linear(x, weight, bias, self.nvidia, self.overlap)


def _fake(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, nvidia: bool, overlap: bool
) -> torch.Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])


@opaque("linear", _fake)
def linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, nvidia: bool, overlap: bool
) -> torch.Tensor:
    """``x W^T + b``: ours for few rows, torch's for more."""
    num_rows = x.shape[0]
    if not 0 < num_rows <= MAX_ROWS:
        return F.linear(x, weight, bias)
    assert x.stride(1) == weight.stride(1) == 1
    out_features, in_features = weight.shape
    tile = tile_for(num_rows, out_features, in_features, nvidia)
    y = x.new_empty(num_rows, out_features)
    grid = (triton.cdiv(out_features, tile.rows),)
    shared = {
        "BLOCK_N": tile.rows,
        "BLOCK_K": tile.columns,
        "EVEN": in_features % tile.columns == 0,
        "HAS_BIAS": bias is not None,
        "OVERLAP": overlap,
        "num_warps": tile.warps,
        **launch_options(overlap),
    }
    sizes = (out_features, in_features)
    if takes_one_row(num_rows, out_features):
        _one_row[grid](x, weight, bias, y, *sizes, weight.stride(0), **shared)
    else:
        strides = (x.stride(0), weight.stride(0))
        tiles = {"BLOCK_M": MAX_ROWS, "STAGES": tile.stages}
        _few_rows[grid](x, weight, bias, y, num_rows, *sizes, *strides, **tiles, **shared)
    return y
