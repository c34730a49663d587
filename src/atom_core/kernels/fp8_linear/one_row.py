"""One row by a weight in FP8, in one launch: every program norms and quantises the row for itself.

:mod:`.words` says how numbers are multiplied.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from atom_core.config import Activation
from atom_core.kernels.fp8_linear.quantize import norm_factor, scale_of, unit_of
from atom_core.kernels.fp8_linear.reference import LIMIT, SMALLEST
from atom_core.kernels.fp8_linear.words import as_multiplied, products_of_words
from atom_core.kernels.gated_activation.triton_kernel import ACTIVATIONS
from atom_core.kernels.linear.parts import finish, weight_rows
from atom_core.kernels.linear.tiles import Tile
from atom_core.kernels.linear.triton_kernel import Norm
from atom_core.kernels.triton_support import launch_options

#: Sizes of the input up to which a program keeps it whole in registers while it looks for the scale.
MAX_INPUTS = 16384


@triton.jit
def _one_row(
    x,
    norm,
    given,
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
    SIZE: tl.constexpr,
    EVEN: tl.constexpr,
    ACTIVATION: tl.constexpr,
    LIMIT: tl.constexpr,
    SMALLEST: tl.constexpr,
    UNIT: tl.constexpr,
    NATIVE: tl.constexpr,
    OVERLAP: tl.constexpr,
    EARLY: tl.constexpr,
):
    GROUPS: tl.constexpr = BLOCK_K // 16
    NORM: tl.constexpr = norm is not None
    dtype: tl.constexpr = x.dtype.element_ty
    fp8: tl.constexpr = weight.dtype.element_ty
    if OVERLAP and EARLY:
        tl.extra.cuda.gdc_launch_dependents()
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
    whole = tl.arange(0, SIZE)
    if NORM:
        factors = tl.load(norm + whole, mask=whole < K, other=0.0).to(tl.float32)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    words = tl.load(x_at, mask=known_two, other=0)
    factor = 1.0
    if NORM or given is None:
        numbers = tl.load(x + whole, mask=whole < K, other=0.0).to(tl.float32)
        if NORM:
            factor = norm_factor(numbers, K, eps)
            numbers = (numbers * factor * factors).to(dtype).to(tl.float32)
    else:
        numbers = 0.0
    scale = scale_of(numbers, given, LIMIT, SMALLEST)
    inverse = tl.div_rn(1.0, scale * UNIT)
    sums = tl.zeros([BLOCK_N, GROUPS], tl.float32)
    for begin in tl.range(BLOCK_K, K, BLOCK_K):
        if not EVEN:
            known = begin // 4 + four < K // 4
            known_two = begin // 2 + two < K // 2
        ahead = tl.load(at + begin // 4, mask=known[None, :], other=0, eviction_policy="evict_first")
        words_ahead = tl.load(x_at + begin // 2, mask=known_two, other=0)
        pairs = as_multiplied(words, norm_words, factor, inverse, NORM, LIMIT, UNIT, dtype, fp8)
        if NORM:
            norm_words = tl.load(norm_at + begin // 2, mask=known_two, other=0)
        sums += products_of_words(tile, pairs, BLOCK_N, GROUPS, NATIVE, fp8)
        tile = ahead
        words = words_ahead
    if OVERLAP and not EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    pairs = as_multiplied(words, norm_words, factor, inverse, NORM, LIMIT, UNIT, dtype, fp8)
    total = tl.sum(sums + products_of_words(tile, pairs, BLOCK_N, GROUPS, NATIVE, fp8), 1) * (
        scale * (64.0 * UNIT * UNIT)
    )
    finish(total[None, :], None, scales, bias, residual, y, row, tl.arange(0, 1), 1, N, 1, BLOCK_N, ACTIVATION)


def tile_for(out_features: int, in_features: int) -> Tile:
    """The tile of a product; on an H200 within a few per cent of the best of 200 in a chain of Qwen3 8B's."""
    if out_features > in_features:
        return Tile("row", 32, 512, 8, early=True)
    return Tile("row", 8, 1024, 8, early=in_features > 4096)


def multiply_row(
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    input_scale: torch.Tensor | None,
    bias: torch.Tensor | None,
    *,
    tile: Tile,
    native: bool,
    overlap: bool,
    norm: Norm | None = None,
    activation: Activation | None = None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """``act(norm(x) (weight_scale W)^T + b) + residual`` of one row, whose norm is quantised.

    Args:
        x: ``[1, K]`` in bfloat16 or float16, of at most :data:`MAX_INPUTS` numbers.
        weight: ``[N, K]`` in a form of e4m3; K is a multiple of 16.
        weight_scale: float32 ``[N]``, of e4m3fn's numbers.
        input_scale: float32 ``[1]`` where it is static.
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
    assert in_features <= MAX_INPUTS
    assert x.storage_offset() % 2 == 0, "numbers are read two at a time"
    assert x.stride(1) == weight.stride(1) == 1
    assert residual is None or residual.is_contiguous()
    outputs = out_features if activation is None else out_features // 2
    y = x.new_empty(1, outputs) if residual is None else residual
    columns = min(tile.columns, triton.next_power_of_2(in_features))
    _one_row[(triton.cdiv(outputs, tile.rows if activation is None else tile.rows // 2),)](
        x,
        None if norm is None else norm.weight,
        input_scale,
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
        SIZE=triton.next_power_of_2(in_features),
        EVEN=in_features % columns == 0,
        ACTIVATION=None if activation is None else ACTIVATIONS[activation],
        LIMIT=LIMIT,
        SMALLEST=SMALLEST,
        UNIT=unit_of(weight.dtype),
        # Triton's interpreter runs no assembly.
        NATIVE=native and not triton.knobs.runtime.interpret,
        OVERLAP=overlap,
        EARLY=tile.early,
        num_warps=tile.warps,
        **launch_options(overlap),
    )
    return y
