"""The common beginning and end of the kernels for few rows, for any dtype of the weight."""

from __future__ import annotations

import triton
import triton.language as tl

from atom_core.kernels.eviction import EVICT_LAST
from atom_core.kernels.gated_activation.triton_kernel import gated

#: Prefetch a number of bytes at an address into the L2 cache, for each thread; 0: nothing.
FETCH_ROWS: tl.constexpr = tl.constexpr(
    "{ .reg .pred any; setp.ne.u32 any, $2, 0; @any cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0; }"
)


@triton.jit
def weight_rows(N, BLOCK_N: tl.constexpr, GATED: tl.constexpr):
    """This program's weight rows, gate and up alternating; indices past the last row repeat it."""
    lane = tl.arange(0, BLOCK_N)
    if GATED:
        half = N // 2
        row = tl.minimum(tl.program_id(0) * (BLOCK_N // 2) + lane // 2, half - 1) + lane % 2 * half
    else:
        row = tl.minimum(tl.program_id(0) * BLOCK_N + lane, N - 1)
    return row.to(tl.int64)


@triton.jit
def fetch_ahead(
    weight, N, stride, BEGIN: tl.constexpr, BYTES: tl.constexpr, BLOCK_N: tl.constexpr, GATED: tl.constexpr
):
    """Prefetch ``BYTES`` of each of this program's rows, from column ``BEGIN`` on, into the L2 cache.

    One thread prefetches a row with one instruction, which needs sm90.
    """
    row = weight_rows(N, BLOCK_N, GATED)
    THREADS: tl.constexpr = tl.extra.cuda.num_threads()
    tl.static_assert(BLOCK_N <= THREADS)
    # One row for each thread of the first BLOCK_N; the other threads prefetch nothing.
    at = (weight + row * stride + BEGIN).to(tl.int64, bitcast=True)
    at = tl.reshape(tl.broadcast_to(at[None, :], (THREADS // BLOCK_N, BLOCK_N)), (THREADS,))
    size = tl.where(tl.arange(0, THREADS) < BLOCK_N, BYTES, 0)
    tl.inline_asm_elementwise(
        FETCH_ROWS,
        "=r,l,r",
        [at, size],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def finish(
    total,
    input_scales,
    scales,
    bias,
    residual,
    y,
    row,
    given,
    M,
    N,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ACTIVATION: tl.constexpr,
):
    """Scale ``total [BLOCK_M, BLOCK_N]``, add bias and residual, activate and store it."""
    if input_scales is not None:
        total *= tl.load(input_scales + given, mask=given < M, other=0.0)[:, None]
    if scales is not None:
        total *= tl.load(scales + row)[None, :]
    if bias is not None:
        total += tl.load(bias + row).to(tl.float32)[None, :]
    width = N
    if ACTIVATION is not None:
        gate, up = tl.split(tl.reshape(total, (BLOCK_M, BLOCK_N // 2, 2)))
        # Rounded as if the activation were a kernel of its own.
        gate = gate.to(y.dtype.element_ty).to(tl.float32)
        up = up.to(y.dtype.element_ty).to(tl.float32)
        total = gated(gate, up, ACTIVATION)
        width = N // 2
        out = tl.program_id(0) * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
    else:
        out = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    at = given.to(tl.int64)[:, None] * width + out[None, :]
    used = (given < M)[:, None] & (out < width)[None, :]
    if residual is not None:
        total += tl.load(residual + at, mask=used, other=0.0).to(tl.float32)
    tl.store(y + at, total.to(y.dtype.element_ty), mask=used, eviction_policy=EVICT_LAST)


@triton.jit
def products(tile, wide, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """``tile * wide``, summed over the elements that one thread has: few registers, no exchange."""
    return tl.sum(tl.reshape(tile.to(tl.float32) * wide[None, :], (BLOCK_N, BLOCK_K // 8, 8)), 2)


@triton.jit
def row_sums(
    at,
    x,
    norm,
    tile,
    factors,
    known,
    K,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN: tl.constexpr,
    COLUMN_STRIDE: tl.constexpr = 1,
):
    """One row ``x [K]`` times all but the last tile of the weight at ``at``, each loaded before the last is used.

    ``tile``, and with a norm its weights ``factors``, are the first tile, already loaded. :func:`row_total` takes the
    results. ``COLUMN_STRIDE``: distance of adjacent columns' tiles in the weight, for the blocked layout.
    """
    column = tl.arange(0, BLOCK_K)
    wide = tl.load(x + column, mask=known, other=0.0).to(tl.float32)
    sums = tl.zeros([BLOCK_N, BLOCK_K // 8], tl.float32)
    squares = tl.zeros([BLOCK_K], tl.float32)
    for begin in tl.range(BLOCK_K, K, BLOCK_K):
        if not EVEN:
            known = begin + column < K
        ahead = tl.load(at + begin * COLUMN_STRIDE, mask=known[None, :], other=0.0, eviction_policy="evict_first")
        wide_ahead = tl.load(x + begin + column, mask=known, other=0.0).to(tl.float32)
        if norm is not None:
            squares += wide * wide
            wide *= factors.to(tl.float32)
            factors = tl.load(norm + begin + column, mask=known, other=0.0)
        sums += products(tile, wide, BLOCK_N, BLOCK_K)
        tile = ahead
        wide = wide_ahead
    return sums, squares, tile, wide, factors


@triton.jit
def normed_total(sums, squares, tile, wide, factors, eps, K, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """``[BLOCK_N]``: the normed total of :func:`row_sums` including its last tile, and the norm's factor."""
    # First, while the last weight tile arrives: LLVM in Triton 3.9 fails to optimise it after the products.
    factor = 1.0 / tl.sqrt(tl.sum(squares + wide * wide, 0) / K + eps)
    total = tl.sum(sums + products(tile, wide * factors.to(tl.float32), BLOCK_N, BLOCK_K), 1)
    return total * factor, factor


@triton.jit
def row_total(sums, squares, tile, wide, factors, norm, eps, K, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """``[BLOCK_N]``: the total of :func:`row_sums` including its last tile."""
    if norm is not None:
        total, _ = normed_total(sums, squares, tile, wide, factors, eps, K, BLOCK_N, BLOCK_K)
    else:
        total = tl.sum(sums + products(tile, wide, BLOCK_N, BLOCK_K), 1)
    return total
