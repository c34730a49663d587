"""Products of one row by FP8 without tensor cores; an int32 holds four weights, or two inputs.

Tensor cores read FP8 from shared memory only, and 64 weight rows at a time: too few programs for one row. Here an
instruction converts e4m3 to float16, two values at a time. Eight products are added in float16, and those sums in
float32.

The input is not quantised: that needs the largest value of each scale's group, which takes a launch of its own or a
wait in each program. It is converted to float16 in groups of 16 values. Each group is multiplied by a power of 2 that
prevents overflow, so a bfloat16 or float16 loses only what is below 2^-18 of its group's largest value. The rounding of
products and their sums in float16 is less than bfloat16's own, and far less than that of an input in e4m3.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def halves(packed, dtype: tl.constexpr):
    """The two 16-bit values of each int32, in float32."""
    low = (packed & 0xFFFF).to(tl.int16).to(dtype, bitcast=True)
    high = ((packed >> 16) & 0xFFFF).to(tl.int16).to(dtype, bitcast=True)
    return low.to(tl.float32), high.to(tl.float32)


@triton.jit
def norm_pairs(norm, two):
    """Pointers to pairs ``two`` of the norm's weight: int32 of two 16-bit numbers, or int64 of two float32."""
    if norm.dtype.element_ty == tl.float32:
        at = norm.to(tl.pointer_type(tl.int64)) + two
    else:
        at = norm.to(tl.pointer_type(tl.int32)) + two
    return at


@triton.jit
def _norm_pair(packed, dtype: tl.constexpr):
    """The two numbers of a loaded pair in float32."""
    if packed.dtype == tl.int64:
        low = packed.to(tl.int32).to(tl.float32, bitcast=True)
        high = (packed >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    else:
        low, high = halves(packed, dtype)
    return low, high


@triton.jit
def _units(most):
    """Powers of 2 that scale groups with largest values ``most`` to between 8 and 16, and their inverses.

    ``most`` has a lower bound of 2^-95, below which the scale would overflow.
    """
    exponent = tl.maximum(most.to(tl.int32, bitcast=True) & 0x7F800000, 0x10000000)
    inverse = (0x7F000000 - exponent + 0x01800000).to(tl.float32, bitcast=True)
    return inverse, (exponent - 0x01800000).to(tl.float32, bitcast=True)


@triton.jit
def _bits(numbers):
    """float16 bits as int32."""
    return numbers.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF


@triton.jit
def _float16(numbers, factors, GROUPS: tl.constexpr):
    """:func:`_bits` after a multiplication by one factor per 8 ``numbers``."""
    return _bits(tl.reshape(tl.reshape(numbers, (GROUPS, 8)) * factors[:, None], (GROUPS * 8,)))


@triton.jit
def as_multiplied(packed, packed_norm, squares, NORM: tl.constexpr, GROUPS: tl.constexpr, dtype: tl.constexpr):
    """Pairs of inputs times the norm's weight, as pairs of float16 below 16 in magnitude.

    Also the inverse scale of each group of 16, and ``squares`` plus the squares of the inputs.
    """
    low, high = halves(packed, dtype)
    if NORM:
        squares += low * low + high * high
        norm_low, norm_high = _norm_pair(packed_norm, dtype)
        low *= norm_low
        high *= norm_high
    most = tl.max(tl.reshape(tl.maximum(tl.abs(low), tl.abs(high)), (GROUPS, 8)), 1)
    inverse, unit = _units(most)
    return _float16(low, inverse, GROUPS) | (_float16(high, inverse, GROUPS) << 16), unit, squares


@triton.jit
def places_as_multiplied(packed, PLACES: tl.constexpr, GROUPS: tl.constexpr, dtype: tl.constexpr):
    """As :func:`as_multiplied` without a norm, for several rows: ``packed [PLACES, 8 GROUPS]``."""
    low, high = halves(packed, dtype)
    most = tl.max(tl.reshape(tl.maximum(tl.abs(low), tl.abs(high)), (PLACES, GROUPS, 8)), 2)
    inverse, unit = _units(most)
    each = tl.reshape(tl.broadcast_to(inverse[:, :, None], (PLACES, GROUPS, 8)), (PLACES, GROUPS * 8))
    return _bits(low * each) | (_bits(high * each) << 16), unit


@triton.jit
def _dot_four(packed, x_packed0, x_packed1, fp8: tl.constexpr):
    """The sum of four products, in float32."""
    x0, x1 = halves(x_packed0, tl.float16)
    x2, x3 = halves(x_packed1, tl.float16)
    w0 = (packed & 0xFF).to(tl.uint8).to(fp8, bitcast=True).to(tl.float32)
    w1 = ((packed >> 8) & 0xFF).to(tl.uint8).to(fp8, bitcast=True).to(tl.float32)
    w2 = ((packed >> 16) & 0xFF).to(tl.uint8).to(fp8, bitcast=True).to(tl.float32)
    w3 = ((packed >> 24) & 0xFF).to(tl.uint8).to(fp8, bitcast=True).to(tl.float32)
    return w0 * x0 + w1 * x1 + w2 * x2 + w3 * x3


@triton.jit
def _dot_sixteen(w0, w1, w2, w3, x0, x1, x2, x3, x4, x5, x6, x7, NATIVE: tl.constexpr, fp8: tl.constexpr):
    """The sum of 16 products: four int32 of e4m3, eight of float16."""
    if NATIVE:
        return tl.inline_asm_elementwise(
            """{
            .reg .b16 l, h; .reg .b32 p, q, a, b; .reg .f32 f0, f1, f2, f3;
            mov.b32 {l, h}, $1; cvt.rn.f16x2.e4m3x2 p, l; cvt.rn.f16x2.e4m3x2 q, h;
            mul.rn.f16x2 a, p, $5; fma.rn.f16x2 a, q, $6, a;
            mov.b32 {l, h}, $2; cvt.rn.f16x2.e4m3x2 p, l; cvt.rn.f16x2.e4m3x2 q, h;
            fma.rn.f16x2 a, p, $7, a; fma.rn.f16x2 a, q, $8, a;
            mov.b32 {l, h}, $3; cvt.rn.f16x2.e4m3x2 p, l; cvt.rn.f16x2.e4m3x2 q, h;
            mul.rn.f16x2 b, p, $9; fma.rn.f16x2 b, q, $10, b;
            mov.b32 {l, h}, $4; cvt.rn.f16x2.e4m3x2 p, l; cvt.rn.f16x2.e4m3x2 q, h;
            fma.rn.f16x2 b, p, $11, b; fma.rn.f16x2 b, q, $12, b;
            mov.b32 {l, h}, a; cvt.f32.f16 f0, l; cvt.f32.f16 f1, h;
            mov.b32 {l, h}, b; cvt.f32.f16 f2, l; cvt.f32.f16 f3, h;
            add.f32 f0, f0, f1; add.f32 f2, f2, f3; add.f32 $0, f0, f2;
            }""",
            "=f,r,r,r,r,r,r,r,r,r,r,r,r",
            [w0, w1, w2, w3, x0, x1, x2, x3, x4, x5, x6, x7],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
    else:  # noqa: RET505 - a compile-time branch: code after a return would be compiled in either case
        return (_dot_four(w0, x0, x1, fp8) + _dot_four(w1, x2, x3, fp8)) + (
            _dot_four(w2, x4, x5, fp8) + _dot_four(w3, x6, x7, fp8)
        )


@triton.jit
def _four(tile):
    """Split ``[.., 2, 2]`` into four tensors in memory order."""
    even, odd = tl.split(tile)
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.jit
def _eight(x_packed):
    """Split ``[.., 2, 2, 2]`` into eight tensors in memory order."""
    even, odd = tl.split(x_packed)
    x0, x2, x4, x6 = _four(even)
    x1, x3, x5, x7 = _four(odd)
    return x0, x1, x2, x3, x4, x5, x6, x7


@triton.jit
def packed_products(
    tile, x_packed, BLOCK_N: tl.constexpr, GROUPS: tl.constexpr, NATIVE: tl.constexpr, fp8: tl.constexpr
):
    """``tile [BLOCK_N, 4 GROUPS]`` times ``x_packed [8 GROUPS]``, summed in groups of 16 values."""
    w0, w1, w2, w3 = _four(tl.reshape(tile, (BLOCK_N, GROUPS, 2, 2)))
    x0, x1, x2, x3, x4, x5, x6, x7 = _eight(tl.reshape(x_packed, (GROUPS, 2, 2, 2)))
    return _dot_sixteen(
        w0,
        w1,
        w2,
        w3,
        x0[None, :],
        x1[None, :],
        x2[None, :],
        x3[None, :],
        x4[None, :],
        x5[None, :],
        x6[None, :],
        x7[None, :],
        NATIVE,
        fp8,
    )


@triton.jit
def packed_products_by_place(
    tile,
    x_packed,
    PLACES: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUPS: tl.constexpr,
    NATIVE: tl.constexpr,
    fp8: tl.constexpr,
):
    """As :func:`packed_products`, for ``tile [PLACES, BLOCK_N, 4 GROUPS]`` and ``x_packed [PLACES, 8 GROUPS]``."""
    w0, w1, w2, w3 = _four(tl.reshape(tile, (PLACES, BLOCK_N, GROUPS, 2, 2)))
    x0, x1, x2, x3, x4, x5, x6, x7 = _eight(tl.reshape(x_packed, (PLACES, GROUPS, 2, 2, 2)))
    return _dot_sixteen(
        w0,
        w1,
        w2,
        w3,
        x0[:, None, :],
        x1[:, None, :],
        x2[:, None, :],
        x3[:, None, :],
        x4[:, None, :],
        x5[:, None, :],
        x6[:, None, :],
        x7[:, None, :],
        NATIVE,
        fp8,
    )


@triton.jit
def first_row(BLOCK_N: tl.constexpr, GATED: tl.constexpr):
    """The first of the rows of :func:`atom_core.kernels.linear.helpers.weight_rows`; the others are in its block."""
    rows: tl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    return tl.program_id(0) * rows


@triton.jit
def scales_of_groups(at, begin, K, GROUPS: tl.constexpr, BLOCK: tl.constexpr):
    """The scale of each group of 16 columns of a tile from column ``begin`` on; 0 where rows have scales.

    Each thread loads the scales that it multiplies by: an exchange would go through shared memory.
    """
    if BLOCK > 0:
        column = begin + 16 * tl.arange(0, GROUPS)
        scales = tl.load(at + column // BLOCK, mask=column < K, other=0.0)
    else:
        scales = 0.0
    return scales


@triton.jit
def _scaled(
    tile,
    scales,
    up_scales,
    x_packed,
    unit,
    GATED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK: tl.constexpr,
    NATIVE: tl.constexpr,
    fp8: tl.constexpr,
):
    """A weight tile times its inputs, ``[BLOCK_N, GROUPS]``, with block scales applied."""
    sums = packed_products(tile, x_packed, BLOCK_N, GROUPS, NATIVE, fp8)
    if BLOCK > 0:
        each = (scales * unit)[None, :]
        if GATED:
            each = tl.where((tl.arange(0, BLOCK_N) % 2 == 0)[:, None], each, (up_scales * unit)[None, :])
        sums *= each
    else:
        sums *= unit[None, :]
    return sums


@triton.jit
def packed_row_sums(
    at,
    scale_at,
    up_scale_at,
    x_at,
    norm_at,
    tile,
    scales,
    up_scales,
    packed,
    packed_norm,
    K,
    NORM: tl.constexpr,
    GATED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK: tl.constexpr,
    EVEN: tl.constexpr,
    NATIVE: tl.constexpr,
    dtype: tl.constexpr,
    fp8: tl.constexpr,
):
    """``[BLOCK_N, BLOCK_K / 16]``: one row times some of a weight, each tile loaded before the last is used.

    Also ``[BLOCK_K / 2]``: sums of squares of the row, with a norm. The norm's weight is applied; its factor is left to
    the caller.

    The first tile is loaded already: ``tile`` from ``at``, ``packed`` of the row from ``x_at``, ``packed_norm`` from
    ``norm_at``. ``BLOCK``: size of scale blocks; all rows are in one block with ``scales`` from ``scale_at``; up rows
    have ``up_scales``. 0: each row has a scale, which the caller applies.
    """
    GROUPS: tl.constexpr = BLOCK_K // 16
    four = tl.arange(0, BLOCK_K // 4)
    two = tl.arange(0, BLOCK_K // 2)
    known = tl.full([BLOCK_K // 4], True, tl.int1)
    known_two = tl.full([BLOCK_K // 2], True, tl.int1)
    sums = tl.zeros([BLOCK_N, GROUPS], tl.float32)
    squares = tl.zeros([BLOCK_K // 2], tl.float32)
    for begin in tl.range(BLOCK_K, K, BLOCK_K):
        if not EVEN:
            known = begin // 4 + four < K // 4
            known_two = begin // 2 + two < K // 2
        ahead = tl.load(at + begin // 4, mask=known[None, :], other=0, eviction_policy="evict_first")
        scales_ahead = scales_of_groups(scale_at, begin, K, GROUPS, BLOCK)
        up_scales_ahead = scales_of_groups(up_scale_at, begin, K, GROUPS, BLOCK) if GATED else 0.0
        packed_ahead = tl.load(x_at + begin // 2, mask=known_two, other=0)
        x_packed, unit, squares = as_multiplied(packed, packed_norm, squares, NORM, GROUPS, dtype)
        if NORM:
            packed_norm = tl.load(norm_at + begin // 2, mask=known_two, other=0)
        sums += _scaled(tile, scales, up_scales, x_packed, unit, GATED, BLOCK_N, GROUPS, BLOCK, NATIVE, fp8)
        tile = ahead
        scales = scales_ahead
        up_scales = up_scales_ahead
        packed = packed_ahead
    x_packed, unit, squares = as_multiplied(packed, packed_norm, squares, NORM, GROUPS, dtype)
    sums += _scaled(tile, scales, up_scales, x_packed, unit, GATED, BLOCK_N, GROUPS, BLOCK, NATIVE, fp8)
    return sums, squares
