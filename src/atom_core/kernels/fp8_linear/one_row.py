"""One row by a weight in FP8, in one launch, with the input as it is: only the weight is FP8.

Quantising needs the row's largest number, which is a launch of its own, or a wait in each program. Here the input
becomes float16 in groups of 16 numbers, each multiplied by a power of 2 such that nothing overflows: a bfloat16 or
float16 loses nothing by that but what is less than a 2^18th of its group's largest. Products with e4m3 are rounded to
float16, eight of them added in it, and those sums added in float32 (:mod:`.words`): less than bfloat16's own rounding,
and far less than that of an input in e4m3.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from atom_core.config import Activation
from atom_core.kernels.fp8_linear.quantize import unit_of
from atom_core.kernels.fp8_linear.words import halves, products_of_words
from atom_core.kernels.gated_activation.triton_kernel import ACTIVATIONS
from atom_core.kernels.linear.parts import fetch_ahead, finish, weight_rows
from atom_core.kernels.linear.tiles import Tile
from atom_core.kernels.linear.triton_kernel import Norm
from atom_core.kernels.triton_support import launch_options


@triton.jit
def _float16(numbers, factors, GROUPS: tl.constexpr):
    """Bits of float16, in a word; a factor for each 8 ``numbers``."""
    numbers = tl.reshape(tl.reshape(numbers, (GROUPS, 8)) * factors[:, None], (GROUPS * 8,))
    return numbers.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF


@triton.jit
def _as_multiplied(words, norm_words, squares, NORM: tl.constexpr, GROUPS: tl.constexpr, dtype: tl.constexpr):
    """Pairs of the input's numbers, times the norm's weight, as pairs of float16 below 16 in magnitude.

    Also what each group of 16 has to be multiplied by to be what it was, and ``squares`` with those of the input.
    """
    low, high = halves(words, dtype)
    if NORM:
        squares += low * low + high * high
        norm_low, norm_high = halves(norm_words, dtype)
        low *= norm_low
        high *= norm_high
    most = tl.max(tl.reshape(tl.maximum(tl.abs(low), tl.abs(high)), (GROUPS, 8)), 1)
    # The exponent of the largest, between 8 and 16 then; not of less than 2^-95, whose inverse would overflow.
    exponent = tl.maximum(most.to(tl.int32, bitcast=True) & 0x7F800000, 0x10000000)
    inverse = (0x7F000000 - exponent + 0x01800000).to(tl.float32, bitcast=True)
    unit = (exponent - 0x01800000).to(tl.float32, bitcast=True)
    return _float16(low, inverse, GROUPS) | (_float16(high, inverse, GROUPS) << 16), unit, squares


@triton.jit
def _one_row(
    x,
    norm,
    weight,
    scales,
    bias,
    residual,
    y,
    eps,
    N,
    K,
    stride_weight,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN: tl.constexpr,
    ACTIVATION: tl.constexpr,
    UNIT: tl.constexpr,
    NATIVE: tl.constexpr,
    OVERLAP: tl.constexpr,
    EARLY: tl.constexpr,
    FETCH: tl.constexpr,
):
    GROUPS: tl.constexpr = BLOCK_K // 16
    NORM: tl.constexpr = norm is not None
    dtype: tl.constexpr = x.dtype.element_ty
    fp8: tl.constexpr = weight.dtype.element_ty
    if OVERLAP and EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    # Weights are read four to a word, inputs two.
    row = weight_rows(N, BLOCK_N, ACTIVATION is not None)
    four = tl.arange(0, BLOCK_K // 4)
    two = tl.arange(0, BLOCK_K // 2)
    at = (weight + row * stride_weight).to(tl.pointer_type(tl.int32))[:, None] + four[None, :]
    x_at = x.to(tl.pointer_type(tl.int32)) + two
    norm_at = x_at
    if NORM:
        norm_at = norm.to(tl.pointer_type(tl.int32)) + two
    # The first tile of the weight is on its way before x is there, and each further one before the last is used.
    known = tl.full([BLOCK_K // 4], True, tl.int1) if EVEN else four < K // 4
    known_two = tl.full([BLOCK_K // 2], True, tl.int1) if EVEN else two < K // 2
    tile = tl.load(at, mask=known[None, :], other=0, eviction_policy="evict_first")
    norm_words = tl.load(norm_at, mask=known_two, other=0) if NORM else 0
    if FETCH > 0:
        fetch_ahead(weight, N, stride_weight, BLOCK_K, FETCH, BLOCK_N, ACTIVATION is not None)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    words = tl.load(x_at, mask=known_two, other=0)
    sums = tl.zeros([BLOCK_N, GROUPS], tl.float32)
    squares = tl.zeros([BLOCK_K // 2], tl.float32)
    for begin in tl.range(BLOCK_K, K, BLOCK_K):
        if not EVEN:
            known = begin // 4 + four < K // 4
            known_two = begin // 2 + two < K // 2
        ahead = tl.load(at + begin // 4, mask=known[None, :], other=0, eviction_policy="evict_first")
        words_ahead = tl.load(x_at + begin // 2, mask=known_two, other=0)
        pairs, unit, squares = _as_multiplied(words, norm_words, squares, NORM, GROUPS, dtype)
        if NORM:
            norm_words = tl.load(norm_at + begin // 2, mask=known_two, other=0)
        sums += products_of_words(tile, pairs, BLOCK_N, GROUPS, NATIVE, fp8) * unit[None, :]
        tile = ahead
        words = words_ahead
    if OVERLAP and not EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    pairs, unit, squares = _as_multiplied(words, norm_words, squares, NORM, GROUPS, dtype)
    total = tl.sum(sums + products_of_words(tile, pairs, BLOCK_N, GROUPS, NATIVE, fp8) * unit[None, :], 1) * UNIT
    if NORM:
        total *= 1.0 / tl.sqrt(tl.sum(squares, 0) / K + eps)
    finish(total[None, :], None, scales, bias, residual, y, row, tl.arange(0, 1), 1, N, 1, BLOCK_N, ACTIVATION)


def tile_for(out_features: int, in_features: int) -> Tile:
    """The tile of a product; on an H200 the best of some 30 in a step of the whole Qwen3 8B."""
    if out_features > in_features:
        if out_features >= 16384:
            return Tile("row", 16, 512, 4, early=True, fetch=256)
        return Tile("row", 32, 512, 8, early=True, fetch=256)
    if in_features > 4096:
        return Tile("row", 8, 1024, 8, early=True, fetch=512)
    return Tile("row", 8, 1024, 4, early=True)


def multiply_row(
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    tile: Tile,
    native: bool,
    overlap: bool,
    norm: Norm | None = None,
    activation: Activation | None = None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """``act(norm(x) (weight_scale W)^T + b) + residual`` of one row, which is not quantised.

    Args:
        x: ``[1, K]`` in bfloat16 or float16.
        weight: ``[N, K]`` in a form of e4m3; K is a multiple of 16.
        weight_scale: float32 ``[N]``, of e4m3fn's numbers.
        bias: ``[N]``.
        tile: the kernel's name in it is not looked at.
        native: the device has an instruction that widens e4m3 to float16.
        overlap: see :func:`atom_core.kernels.triton_support.overlaps`.
        norm: norm ``x`` first.
        activation: the weight is ``[gate | up]``; the result is ``[1, N / 2]``.
        residual: contiguous, in the result's shape; it is written to, and is the result.
    """
    out_features, in_features = weight.shape
    assert x.shape == (1, in_features)
    assert in_features % 16 == 0
    assert x.storage_offset() % 2 == 0, "numbers are read two at a time"
    assert x.stride(1) == weight.stride(1) == 1
    assert residual is None or residual.is_contiguous()
    outputs = out_features if activation is None else out_features // 2
    y = x.new_empty(1, outputs) if residual is None else residual
    columns = min(tile.columns, triton.next_power_of_2(in_features))
    _one_row[(triton.cdiv(outputs, tile.rows if activation is None else tile.rows // 2),)](
        x,
        None if norm is None else norm.weight,
        weight,
        weight_scale,
        bias,
        residual,
        y,
        0.0 if norm is None else norm.eps,
        out_features,
        in_features,
        weight.stride(0),
        BLOCK_N=tile.rows,
        BLOCK_K=columns,
        EVEN=in_features % columns == 0,
        ACTIVATION=None if activation is None else ACTIVATIONS[activation],
        UNIT=unit_of(weight.dtype),
        # Triton's interpreter runs no assembly.
        NATIVE=native and not triton.knobs.runtime.interpret,
        OVERLAP=overlap,
        EARLY=tile.early,
        FETCH=tile.fetched(weight, overlap),
        num_warps=tile.warps,
        **launch_options(overlap),
    )
    return y
