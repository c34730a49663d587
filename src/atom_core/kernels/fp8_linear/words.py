"""Products of one row in FP8 without tensor cores: weights are read four to a word, inputs two.

Tensor cores take FP8 from shared memory alone, and 64 rows of the weight at a time: too few programs for one row. Here
e4m3 is widened to float16 by the hardware's instruction, two numbers at a time; eight products are added in float16,
and those sums in float32. Where the input is e4m3 as well, a product of two is exact in float16, in which the input's
are a 64th of themselves so that nothing overflows; the sums' rounding is a quarter of that of tensor cores' own sums of
FP8.
"""

from __future__ import annotations

import triton
import triton.language as tl

from atom_core.kernels.fp8_linear.quantize import narrowed

#: Sizes of the input up to which a program keeps it whole in registers while it looks for a scale or a norm's factor.
MAX_INPUTS = 16384


@triton.jit
def halves(words, dtype: tl.constexpr):
    """The two 16-bit numbers of each word, in float32."""
    low = (words & 0xFFFF).to(tl.int16).to(dtype, bitcast=True)
    high = ((words >> 16) & 0xFFFF).to(tl.int16).to(dtype, bitcast=True)
    return low.to(tl.float32), high.to(tl.float32)


@triton.jit
def sixty_fourth(numbers):
    """Bits of float16, in a word."""
    return (numbers.to(tl.float32) * 0.015625).to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF


@triton.jit
def _normed(words, norm_words, factor, NORM: tl.constexpr, dtype: tl.constexpr):
    """The two numbers of each word, behind a norm or not."""
    low, high = halves(words, dtype)
    if NORM:
        norm_low, norm_high = halves(norm_words, dtype)
        # rounded between norm and scale, as the model defines them
        low = (low * factor * norm_low).to(dtype).to(tl.float32)
        high = (high * factor * norm_high).to(dtype).to(tl.float32)
    return low, high


@triton.jit
def as_multiplied(
    words,
    norm_words,
    factor,
    inverse,
    NORM: tl.constexpr,
    LIMIT: tl.constexpr,
    UNIT: tl.constexpr,
    dtype: tl.constexpr,
    fp8: tl.constexpr,
):
    """Pairs of the input's numbers, normed and quantised, as pairs of float16: a 64th of what e4m3 has."""
    low, high = _normed(words, norm_words, factor, NORM, dtype)
    low = sixty_fourth(narrowed(low, inverse, LIMIT, UNIT, fp8))
    high = sixty_fourth(narrowed(high, inverse, LIMIT, UNIT, fp8))
    return low | (high << 16)


@triton.jit
def _of_word(word, pair0, pair1, fp8: tl.constexpr):
    """The sum of four products, in float32."""
    x0, x1 = halves(pair0, tl.float16)
    x2, x3 = halves(pair1, tl.float16)
    w0 = (word & 0xFF).to(tl.uint8).to(fp8, bitcast=True).to(tl.float32)
    w1 = ((word >> 8) & 0xFF).to(tl.uint8).to(fp8, bitcast=True).to(tl.float32)
    w2 = ((word >> 16) & 0xFF).to(tl.uint8).to(fp8, bitcast=True).to(tl.float32)
    w3 = ((word >> 24) & 0xFF).to(tl.uint8).to(fp8, bitcast=True).to(tl.float32)
    return w0 * x0 + w1 * x1 + w2 * x2 + w3 * x3


@triton.jit
def _sixteen(w0, w1, w2, w3, x0, x1, x2, x3, x4, x5, x6, x7, NATIVE: tl.constexpr, fp8: tl.constexpr):
    """The sum of the products of 16 numbers: four words of e4m3, eight of float16."""
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
    else:  # noqa: RET505 - decided when compiling, and what stands behind a return would be compiled all the same
        return (_of_word(w0, x0, x1, fp8) + _of_word(w1, x2, x3, fp8)) + (
            _of_word(w2, x4, x5, fp8) + _of_word(w3, x6, x7, fp8)
        )


@triton.jit
def _four(tile):
    """``[.., 2, 2]`` as four tensors, in the order in which they lie."""
    even, odd = tl.split(tile)
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.jit
def _eight(pairs):
    """``[.., 2, 2, 2]`` as eight tensors, in the order in which they lie."""
    even, odd = tl.split(pairs)
    x0, x2, x4, x6 = _four(even)
    x1, x3, x5, x7 = _four(odd)
    return x0, x1, x2, x3, x4, x5, x6, x7


@triton.jit
def products_of_words(
    tile, pairs, BLOCK_N: tl.constexpr, GROUPS: tl.constexpr, NATIVE: tl.constexpr, fp8: tl.constexpr
):
    """``tile [BLOCK_N, 4 GROUPS]`` times ``pairs [8 GROUPS]``, summed up in groups of 16 numbers."""
    w0, w1, w2, w3 = _four(tl.reshape(tile, (BLOCK_N, GROUPS, 2, 2)))
    x0, x1, x2, x3, x4, x5, x6, x7 = _eight(tl.reshape(pairs, (GROUPS, 2, 2, 2)))
    return _sixteen(
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
def products_of_places(
    tile,
    pairs,
    PLACES: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUPS: tl.constexpr,
    NATIVE: tl.constexpr,
    fp8: tl.constexpr,
):
    """As :func:`products_of_words`, of ``tile [PLACES, BLOCK_N, 4 GROUPS]`` and ``pairs [PLACES, 8 GROUPS]``."""
    w0, w1, w2, w3 = _four(tl.reshape(tile, (PLACES, BLOCK_N, GROUPS, 2, 2)))
    x0, x1, x2, x3, x4, x5, x6, x7 = _eight(tl.reshape(pairs, (PLACES, GROUPS, 2, 2, 2)))
    return _sixteen(
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
def grouped_as_multiplied(
    words,
    norm_words,
    factor,
    NORM: tl.constexpr,
    PLACES: tl.constexpr,
    GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
    LIMIT: tl.constexpr,
    SMALLEST: tl.constexpr,
    UNIT: tl.constexpr,
    dtype: tl.constexpr,
    fp8: tl.constexpr,
):
    """As :func:`as_multiplied`, where each ``SIZE`` numbers have the scale that their largest magnitude asks for.

    ``words``: ``[PLACES, GROUPS * 8]``, rows of numbers whose groups of 16 are ``GROUPS`` each. Beside the pairs come
    the scales, ``[PLACES, GROUPS * 16 / SIZE]``.
    """
    BLOCKS: tl.constexpr = GROUPS * 16 // SIZE
    low, high = _normed(words, norm_words, factor, NORM, dtype)
    largest = tl.max(tl.reshape(tl.maximum(tl.abs(low), tl.abs(high)), (PLACES, BLOCKS, SIZE // 2)), 2)
    scale = tl.div_rn(tl.maximum(largest, SMALLEST), LIMIT)
    inverse = tl.div_rn(1.0, scale * UNIT)
    each = tl.reshape(tl.broadcast_to(inverse[:, :, None], (PLACES, BLOCKS, SIZE // 2)), (PLACES, GROUPS * 8))
    low = sixty_fourth(narrowed(low, each, LIMIT, UNIT, fp8))
    high = sixty_fourth(narrowed(high, each, LIMIT, UNIT, fp8))
    return low | (high << 16), scale


@triton.jit
def each_sixteen(scales, PLACES: tl.constexpr, BLOCKS: tl.constexpr, SIZE: tl.constexpr, NATIVE: tl.constexpr):
    """Scales ``[PLACES, BLOCKS]`` of ``SIZE`` numbers as those of each 16, ``[PLACES, BLOCKS * SIZE / 16]``."""
    if NATIVE:
        # They are sent to the threads that multiply by them. Without what changes nothing here, Triton would have those
        # threads quantise the row once more.
        scales = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=f,f", [scales], dtype=tl.float32, is_pure=False, pack=1)
    each = tl.broadcast_to(scales[:, :, None], (PLACES, BLOCKS, SIZE // 16))
    return tl.reshape(each, (PLACES, BLOCKS * SIZE // 16))


@triton.jit
def _scaled(
    tile,
    scales,
    up_scales,
    words,
    norm_words,
    factor,
    inverse,
    NORM: tl.constexpr,
    GATED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK: tl.constexpr,
    LIMIT: tl.constexpr,
    SMALLEST: tl.constexpr,
    UNIT: tl.constexpr,
    NATIVE: tl.constexpr,
    dtype: tl.constexpr,
    fp8: tl.constexpr,
):
    """A tile of the weight by what it meets of the row, ``[BLOCK_N, GROUPS]``; with blocks times both sides' scales."""
    if BLOCK > 0:
        if NORM:
            norm_words = norm_words[None, :]
        BLOCKS: tl.constexpr = GROUPS * 16 // BLOCK
        pairs, theirs = grouped_as_multiplied(
            words[None, :], norm_words, factor, NORM, 1, GROUPS, BLOCK, LIMIT, SMALLEST, UNIT, dtype, fp8
        )
        each = each_sixteen(scales * theirs, 1, BLOCKS, BLOCK, NATIVE)
        if GATED:
            up = each_sixteen(up_scales * theirs, 1, BLOCKS, BLOCK, NATIVE)
            each = tl.where((tl.arange(0, BLOCK_N) % 2 == 0)[:, None], each, up)
        pairs = tl.reshape(pairs, (GROUPS * 8,))
        parts = products_of_words(tile, pairs, BLOCK_N, GROUPS, NATIVE, fp8) * each
    else:
        pairs = as_multiplied(words, norm_words, factor, inverse, NORM, LIMIT, UNIT, dtype, fp8)
        parts = products_of_words(tile, pairs, BLOCK_N, GROUPS, NATIVE, fp8)
    return parts


@triton.jit
def first_row(BLOCK_N: tl.constexpr, GATED: tl.constexpr):
    """The first of the rows of :func:`atom_core.kernels.linear.parts.weight_rows`; behind it are those of its block."""
    rows: tl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    return tl.program_id(0) * rows


@triton.jit
def block_scales(at, begin, K, BLOCKS: tl.constexpr, BLOCK: tl.constexpr):
    """``[1, BLOCKS]`` of the scales at ``at``, of a tile from column ``begin`` on; nothing where rows have them."""
    if BLOCK > 0:
        block = begin // BLOCK + tl.arange(0, BLOCKS)[None, :]
        scales = tl.load(at + block, mask=block < tl.cdiv(K, BLOCK), other=0.0)
    else:
        scales = 0.0
    return scales


@triton.jit
def row_sums_of_words(
    at,
    scale_at,
    up_scale_at,
    x_at,
    norm_at,
    tile,
    scales,
    up_scales,
    words,
    norm_words,
    factor,
    inverse,
    K,
    NORM: tl.constexpr,
    GATED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK: tl.constexpr,
    EVEN: tl.constexpr,
    LIMIT: tl.constexpr,
    SMALLEST: tl.constexpr,
    UNIT: tl.constexpr,
    NATIVE: tl.constexpr,
    dtype: tl.constexpr,
    fp8: tl.constexpr,
):
    """``[BLOCK_N, BLOCK_K / 16]``: one row times some of a weight, each tile loaded before the last is used.

    The first of all is loaded already: ``tile`` from ``at``, ``words`` of the row from ``x_at``, ``norm_words`` from
    ``norm_at``; ``factor`` is that of the norm. ``BLOCK``: columns that share a scale, and the rows are of one block,
    whose ``scales`` are from ``scale_at``, or with gates theirs are, and ups' are ``up_scales``. 0: ``inverse`` is what
    1 is of the row's scale, and the weight's are left to the caller. The sums are a 64th.
    """
    GROUPS: tl.constexpr = BLOCK_K // 16
    four = tl.arange(0, BLOCK_K // 4)
    two = tl.arange(0, BLOCK_K // 2)
    BLOCKS: tl.constexpr = BLOCK_K // BLOCK if BLOCK > 0 else 1
    known = tl.full([BLOCK_K // 4], True, tl.int1)
    known_two = tl.full([BLOCK_K // 2], True, tl.int1)
    sums = tl.zeros([BLOCK_N, GROUPS], tl.float32)
    for begin in tl.range(BLOCK_K, K, BLOCK_K):
        if not EVEN:
            known = begin // 4 + four < K // 4
            known_two = begin // 2 + two < K // 2
        ahead = tl.load(at + begin // 4, mask=known[None, :], other=0, eviction_policy="evict_first")
        scales_ahead = block_scales(scale_at, begin, K, BLOCKS, BLOCK)
        up_scales_ahead = block_scales(up_scale_at, begin, K, BLOCKS, BLOCK) if GATED else 0.0
        words_ahead = tl.load(x_at + begin // 2, mask=known_two, other=0)
        sums += _scaled(
            tile,
            scales,
            up_scales,
            words,
            norm_words,
            factor,
            inverse,
            NORM,
            GATED,
            BLOCK_N,
            GROUPS,
            BLOCK,
            LIMIT,
            SMALLEST,
            UNIT,
            NATIVE,
            dtype,
            fp8,
        )
        if NORM:
            norm_words = tl.load(norm_at + begin // 2, mask=known_two, other=0)
        tile = ahead
        scales = scales_ahead
        up_scales = up_scales_ahead
        words = words_ahead
    return sums + _scaled(
        tile,
        scales,
        up_scales,
        words,
        norm_words,
        factor,
        inverse,
        NORM,
        GATED,
        BLOCK_N,
        GROUPS,
        BLOCK,
        LIMIT,
        SMALLEST,
        UNIT,
        NATIVE,
        dtype,
        fp8,
    )
