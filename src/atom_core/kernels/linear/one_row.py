"""One row by a weight, element by element, without tensor cores.

The first weight tile is loaded before the input is ready, and each further one before the last is used, so memory is
always busy: in registers, or in shared memory, which has room for more tiles.
"""

from __future__ import annotations

import triton
import triton.language as tl

from atom_core.kernels.launch import entry_kernel
from atom_core.kernels.linear.helpers import fetch_ahead, finish, products, row_sums, row_total, weight_rows


@entry_kernel
@triton.jit
def one_row(
    x,
    input_scales,
    norm,
    weight,
    scales,
    bias,
    residual,
    y,
    eps,
    M,
    N,
    K,
    stride_x,
    stride_weight,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN: tl.constexpr,
    ACTIVATION: tl.constexpr,
    OVERLAP: tl.constexpr,
    EARLY: tl.constexpr,
    FETCH: tl.constexpr,
):
    """Tiles in registers: each is loaded before the last is used."""
    tl.static_assert(input_scales is None)
    if OVERLAP and EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    row = weight_rows(N, BLOCK_N, ACTIVATION is not None)
    column = tl.arange(0, BLOCK_K)
    at = weight + row[:, None] * stride_weight + column[None, :]
    # The first weight tile is loaded before x is ready, and each further one before the last is used.
    known = tl.full([BLOCK_K], True, tl.int1) if EVEN else column < K
    tile = tl.load(at, mask=known[None, :], other=0.0, eviction_policy="evict_first")
    factors = tl.load(norm + column, mask=known, other=0.0) if norm is not None else 0.0
    if FETCH > 0:
        fetch_ahead(weight, N, stride_weight, BLOCK_K, FETCH, BLOCK_N, ACTIVATION is not None)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    sums, squares, tile, wide, factors = row_sums(at, x, norm, tile, factors, known, K, BLOCK_N, BLOCK_K, EVEN)
    if OVERLAP and not EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    total = row_total(sums, squares, tile, wide, factors, norm, eps, K, BLOCK_N, BLOCK_K)
    finish(total[None, :], None, scales, bias, residual, y, row, tl.arange(0, 1), M, N, 1, BLOCK_N, ACTIVATION)


@entry_kernel
@triton.jit
def one_row_ring(
    x,
    input_scales,
    norm,
    weight,
    scales,
    bias,
    residual,
    y,
    eps,
    M,
    N,
    K,
    stride_x,
    stride_weight,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN: tl.constexpr,
    ACTIVATION: tl.constexpr,
    OVERLAP: tl.constexpr,
    EARLY: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Tiles in shared memory: ``STAGES`` are in flight."""
    tl.static_assert(input_scales is None)
    if OVERLAP and EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    row = weight_rows(N, BLOCK_N, ACTIVATION is not None)
    column = tl.arange(0, BLOCK_K)
    at = weight + row[:, None] * stride_weight + column[None, :]
    sums = tl.zeros([BLOCK_N, BLOCK_K // 8], tl.float32)
    squares = tl.zeros([BLOCK_K], tl.float32)
    following = tl.zeros([BLOCK_K], x.dtype.element_ty)
    for begin in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        known = tl.full([BLOCK_K], True, tl.int1) if EVEN else begin + column < K
        tile = tl.load(at + begin, mask=known[None, :], other=0.0, eviction_policy="evict_first")
        here = following
        # The pipeline hoists its loads above the loop. The input must not be hoisted, so its load, and the wait for it,
        # are under a condition.
        if begin == 0:
            if OVERLAP:
                tl.extra.cuda.gdc_wait()
            here = tl.load(x + column, mask=known, other=0.0)
        if begin + BLOCK_K < K:
            ahead = begin + BLOCK_K + column
            following = tl.load(x + ahead, mask=None if EVEN else ahead < K, other=None if EVEN else 0.0)
        wide = here.to(tl.float32)
        if norm is not None:
            squares += wide * wide
            wide *= tl.load(norm + begin + column, mask=known, other=0.0).to(tl.float32)
        sums += products(tile, wide, BLOCK_N, BLOCK_K)
    if OVERLAP and not EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    total = tl.sum(sums, 1)
    if norm is not None:
        total *= 1.0 / tl.sqrt(tl.sum(squares, 0) / K + eps)
    finish(total[None, :], None, scales, bias, residual, y, row, tl.arange(0, 1), M, N, 1, BLOCK_N, ACTIVATION)
