"""What the kernels of few rows begin and end with, whichever dtype the weight has."""

from __future__ import annotations

import triton
import triton.language as tl

from atom_core.kernels.eviction import EVICT_LAST
from atom_core.kernels.gated_activation.triton_kernel import gated

#: Has each thread's bytes at an address, as many as it says, fetched to the second-level cache; none where it says 0.
FETCH_ROWS: tl.constexpr = tl.constexpr(
    "{ .reg .pred any; setp.ne.u32 any, $2, 0; @any cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0; }"
)


@triton.jit
def weight_rows(N, BLOCK_N: tl.constexpr, GATED: tl.constexpr):
    """The weight's rows of this program, in the order in which it takes them; past the last, the last again."""
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
    """Have ``BYTES`` of each of this program's rows fetched to the second-level cache, from the column ``BEGIN`` on.

    A row is one instruction of one thread, and from sm90 on there is one for it.
    """
    row = weight_rows(N, BLOCK_N, GATED)
    THREADS: tl.constexpr = tl.extra.cuda.num_threads()
    tl.static_assert(BLOCK_N <= THREADS)
    # A row of a tile for each thread, which has one element then; those beyond ask for nothing.
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
    """Scale ``total [BLOCK_M, BLOCK_N]``, add what is to be added, activate and store."""
    if input_scales is not None:
        total *= tl.load(input_scales + given, mask=given < M, other=0.0)[:, None]
    if scales is not None:
        total *= tl.load(scales + row)[None, :]
    if bias is not None:
        total += tl.load(bias + row).to(tl.float32)[None, :]
    width = N
    if ACTIVATION is not None:
        gate, up = tl.split(tl.reshape(total, (BLOCK_M, BLOCK_N // 2, 2)))
        # Rounded where a kernel of its own would read them.
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
    """``tile * wide``, summed up as far as one thread has the numbers: few registers, no exchange."""
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
    FAR: tl.constexpr = 1,
):
    """All but the last tile of one row ``x [K]`` times the weight at ``at``, each loaded before the last is used.

    ``tile``, and with a norm its weights ``factors``, are the first, loaded already; what is returned is for
    :func:`row_total`. ``FAR``: how far the weight's columns are apart, where those of one tile lie together.
    """
    column = tl.arange(0, BLOCK_K)
    wide = tl.load(x + column, mask=known, other=0.0).to(tl.float32)
    sums = tl.zeros([BLOCK_N, BLOCK_K // 8], tl.float32)
    squares = tl.zeros([BLOCK_K], tl.float32)
    for begin in tl.range(BLOCK_K, K, BLOCK_K):
        if not EVEN:
            known = begin + column < K
        ahead = tl.load(at + begin * FAR, mask=known[None, :], other=0.0, eviction_policy="evict_first")
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
    """``[BLOCK_N]`` of what :func:`row_sums` left behind a norm, its last tile included, and the norm's factor."""
    # First, while the last tile of the weight is on its way; behind the products LLVM gives up on it in Triton 3.9.
    factor = 1.0 / tl.sqrt(tl.sum(squares + wide * wide, 0) / K + eps)
    total = tl.sum(sums + products(tile, wide * factors.to(tl.float32), BLOCK_N, BLOCK_K), 1)
    return total * factor, factor


@triton.jit
def row_total(sums, squares, tile, wide, factors, norm, eps, K, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """``[BLOCK_N]`` of what :func:`row_sums` left, its last tile included."""
    if norm is not None:
        total, _ = normed_total(sums, squares, tile, wide, factors, eps, K, BLOCK_N, BLOCK_K)
    else:
        total = tl.sum(sums + products(tile, wide, BLOCK_N, BLOCK_K), 1)
    return total
