"""One row by a weight in blocks, in one launch: every program norms and quantises the row for itself.

As :mod:`atom_core.kernels.fp8_linear.one_row`; a group's scale is known where its 128 numbers are, so the row is read
once more only where a norm asks for all of it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from atom_core.config import Activation
from atom_core.kernels.fp8_linear.quantize import norm_factor, unit_of
from atom_core.kernels.fp8_linear.reference import LIMIT, SMALLEST
from atom_core.kernels.fp8_linear.words import MAX_INPUTS, block_scales, first_row, row_sums_of_words
from atom_core.kernels.gated_activation.triton_kernel import ACTIVATIONS
from atom_core.kernels.linear.parts import finish, weight_rows
from atom_core.kernels.linear.tiles import Tile
from atom_core.kernels.linear.triton_kernel import Norm
from atom_core.kernels.triton_support import launch_options
from atom_core.quant.fp8 import BLOCK_SIZE


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
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    EVEN: tl.constexpr,
    ACTIVATION: tl.constexpr,
    LIMIT: tl.constexpr,
    SMALLEST: tl.constexpr,
    UNIT: tl.constexpr,
    NATIVE: tl.constexpr,
    OVERLAP: tl.constexpr,
    EARLY: tl.constexpr,
):
    NORM: tl.constexpr = norm is not None
    GATED: tl.constexpr = ACTIVATION is not None
    dtype: tl.constexpr = x.dtype.element_ty
    fp8: tl.constexpr = weight.dtype.element_ty
    if OVERLAP and EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    row = weight_rows(N, BLOCK_N, GATED)
    four = tl.arange(0, BLOCK_K // 4)
    two = tl.arange(0, BLOCK_K // 2)
    at = (weight + row * K).to(tl.pointer_type(tl.int32))[:, None] + four[None, :]
    scale_at = scales + first_row(BLOCK_N, GATED) // BLOCK * tl.cdiv(K, BLOCK)
    up_scale_at = scales + (first_row(BLOCK_N, GATED) + N // 2) // BLOCK * tl.cdiv(K, BLOCK)
    x_at = x.to(tl.pointer_type(tl.int32)) + two
    norm_at = x_at
    if NORM:
        norm_at = norm.to(tl.pointer_type(tl.int32)) + two
    # The first tile of the weight is on its way before x is there.
    known = tl.full([BLOCK_K // 4], True, tl.int1) if EVEN else four < K // 4
    known_two = tl.full([BLOCK_K // 2], True, tl.int1) if EVEN else two < K // 2
    tile = tl.load(at, mask=known[None, :], other=0, eviction_policy="evict_first")
    mine = block_scales(scale_at, 0, K, BLOCK_K // BLOCK, BLOCK)
    up_scales = block_scales(up_scale_at, 0, K, BLOCK_K // BLOCK, BLOCK) if GATED else 0.0
    norm_words = tl.load(norm_at, mask=known_two, other=0) if NORM else 0
    whole = tl.arange(0, SIZE)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    words = tl.load(x_at, mask=known_two, other=0)
    factor = 1.0
    if NORM:
        factor = norm_factor(tl.load(x + whole, mask=whole < K, other=0.0).to(tl.float32), K, eps)
    sums = row_sums_of_words(
        at,
        scale_at,
        up_scale_at,
        x_at,
        norm_at,
        tile,
        mine,
        up_scales,
        words,
        norm_words,
        factor,
        1.0,
        K,
        NORM,
        GATED,
        BLOCK_N,
        BLOCK_K,
        BLOCK,
        EVEN,
        LIMIT,
        SMALLEST,
        UNIT,
        NATIVE,
        dtype,
        fp8,
    )
    if OVERLAP and not EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    total = tl.sum(sums, 1) * (64.0 * UNIT * UNIT)
    finish(total[None, :], None, None, bias, residual, y, row, tl.arange(0, 1), 1, N, 1, BLOCK_N, ACTIVATION)


def tile_for(out_features: int, in_features: int) -> Tile:
    """The tile of a product."""
    if out_features > in_features:
        return Tile("row", 16, 1024, 8, early=True)
    return Tile("row", 8, 1024, 8, early=True)


def why_not_one_row(x: torch.Tensor, out_features: int, tile: Tile, activation: Activation | None) -> str | None:
    """None where :func:`multiply_row` takes ``x [1, K]``, else the reason."""
    size = x.shape[1]
    if activation is not None and out_features // 2 % BLOCK_SIZE and out_features // 2 % (tile.rows // 2):
        return f"a program's rows of up may be those of two blocks: {out_features // 2} of gate are in front of them"
    if x.dtype not in (torch.bfloat16, torch.float16):
        return f"numbers are read two to a word, and {x.dtype} has other sizes"
    if size % 16 or size > MAX_INPUTS:
        return f"{size} is no multiple of 16, or more than {MAX_INPUTS}"
    return "the row begins within a word" if x.storage_offset() % 2 else None


def multiply_row(
    x: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    tile: Tile,
    native: bool,
    overlap: bool,
    norm: Norm | None = None,
    activation: Activation | None = None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """``act(norm(x) W^T + b) + residual`` of one row, whose norm is quantised.

    Args:
        x: ``[1, K]``, of which :func:`why_not_one_row` has nothing to say.
        weight: ``[N, K]`` in a form of e4m3, contiguous.
        scales: float32 ``[ceil(N / 128), ceil(K / 128)]``, of e4m3fn's numbers.
        bias: ``[N]``.
        tile: the kernel's name in it is not looked at; its columns are whole blocks, its rows divide one.
        native: the device has an instruction that widens e4m3 to float16.
        overlap: see :func:`atom_core.kernels.triton_support.overlaps`.
        norm: norm ``x`` first.
        activation: the weight is ``[gate | up]``; the result is ``[1, N / 2]``.
        residual: contiguous, in the result's shape; it is written to, and is the result.
    """
    out_features, in_features = weight.shape
    assert x.shape == (1, in_features)
    assert why_not_one_row(x, out_features, tile, activation) is None
    assert x.stride(1) == 1
    assert weight.is_contiguous()
    assert scales.is_contiguous()
    assert residual is None or residual.is_contiguous()
    assert tile.columns % BLOCK_SIZE == BLOCK_SIZE % tile.rows == 0
    outputs = out_features if activation is None else out_features // 2
    y = x.new_empty(1, outputs) if residual is None else residual
    padded = triton.next_power_of_2(in_features)
    columns = min(tile.columns, max(BLOCK_SIZE, padded))
    _one_row[(triton.cdiv(outputs, tile.rows if activation is None else tile.rows // 2),)](
        x,
        None if norm is None else norm.weight,
        weight,
        scales,
        bias,
        residual,
        y,
        0.0 if norm is None else norm.eps,
        out_features,
        in_features,
        BLOCK_N=tile.rows,
        BLOCK_K=columns,
        SIZE=padded,
        BLOCK=BLOCK_SIZE,
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
