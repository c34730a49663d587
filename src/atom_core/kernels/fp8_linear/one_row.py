"""One row by a weight in FP8 with row or block scales, in one launch with an unquantised input (:mod:`.packed`)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from atom_core.kernels.fp8_linear.packed import first_row, norm_pairs, packed_row_sums, scales_of_groups
from atom_core.kernels.fp8_linear.quantize import unit_of
from atom_core.kernels.gated_activation.triton_kernel import ACTIVATIONS
from atom_core.kernels.launch import entry_kernel
from atom_core.kernels.linear.helpers import fetch_ahead, finish, weight_rows
from atom_core.kernels.linear.tiles import Tile
from atom_core.kernels.linear.triton_kernel import Norm
from atom_core.kernels.triton_support import cdiv, launch_options, next_power_of_2
from atom_core.types import Activation


@entry_kernel
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
    BLOCK: tl.constexpr,
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
    GATED: tl.constexpr = ACTIVATION is not None
    dtype: tl.constexpr = x.dtype.element_ty
    fp8: tl.constexpr = weight.dtype.element_ty
    if OVERLAP and EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    # An int32 holds four weights, or two inputs.
    row = weight_rows(N, BLOCK_N, GATED)
    four = tl.arange(0, BLOCK_K // 4)
    two = tl.arange(0, BLOCK_K // 2)
    at = (weight + row * stride_weight).to(tl.pointer_type(tl.int32))[:, None] + four[None, :]
    x_at = x.to(tl.pointer_type(tl.int32)) + two
    norm_at = x_at
    if NORM:
        norm_at = norm_pairs(norm, two)
    scale_at = scales
    up_scale_at = scales
    if BLOCK > 0:
        scale_at += first_row(BLOCK_N, GATED) // BLOCK * tl.cdiv(K, BLOCK)
        up_scale_at += (first_row(BLOCK_N, GATED) + N // 2) // BLOCK * tl.cdiv(K, BLOCK)
    # The first weight tile is loaded before x is ready, and each further one before the last is used.
    known = tl.full([BLOCK_K // 4], True, tl.int1) if EVEN else four < K // 4
    known_two = tl.full([BLOCK_K // 2], True, tl.int1) if EVEN else two < K // 2
    tile = tl.load(at, mask=known[None, :], other=0, eviction_policy="evict_first")
    mine = scales_of_groups(scale_at, 0, K, GROUPS, BLOCK)
    up_scales = scales_of_groups(up_scale_at, 0, K, GROUPS, BLOCK) if GATED else 0.0
    packed_norm = tl.load(norm_at, mask=known_two, other=0) if NORM else 0
    if FETCH > 0:
        fetch_ahead(weight, N, stride_weight, BLOCK_K, FETCH, BLOCK_N, GATED)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    packed = tl.load(x_at, mask=known_two, other=0)
    sums, squares = packed_row_sums(
        at,
        scale_at,
        up_scale_at,
        x_at,
        norm_at,
        tile,
        mine,
        up_scales,
        packed,
        packed_norm,
        K,
        NORM,
        GATED,
        BLOCK_N,
        BLOCK_K,
        BLOCK,
        EVEN,
        NATIVE,
        dtype,
        fp8,
    )
    if OVERLAP and not EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    total = tl.sum(sums, 1) * UNIT
    if NORM:
        total *= 1.0 / tl.sqrt(tl.sum(squares, 0) / K + eps)
    of_rows = scales if BLOCK == 0 else None
    finish(total[None, :], None, of_rows, bias, residual, y, row, tl.arange(0, 1), 1, N, 1, BLOCK_N, ACTIVATION)


def tile_for(out_features: int, in_features: int) -> Tile:
    """The tile of a product; on an H200 the best of some 30 in a step of the whole Qwen3 8B."""
    if out_features > in_features:
        if out_features >= 16384:
            return Tile("row", 16, 512, 4, early=True, fetch=256)
        return Tile("row", 32, 512, 8, early=True, fetch=256)
    if in_features > 4096:
        return Tile("row", 8, 1024, 8, early=True, fetch=512)
    return Tile("row", 8, 1024, 4, early=True)


def why_not_one_row(
    x: torch.Tensor, out_features: int, tile: Tile, activation: Activation | None, block: int
) -> str | None:
    """None where :func:`multiply_row` supports ``x [1, K]``, else the reason."""
    size = x.shape[1]
    if activation is not None and block and out_features // 2 % block and out_features // 2 % (tile.rows // 2):
        return f"a program's up rows may be in two blocks: they come after {out_features // 2} gate rows"
    if x.dtype not in (torch.bfloat16, torch.float16):
        return f"inputs are read as pairs of 16 bits, not as {x.dtype}"
    if size % 16:
        return f"{size} is no multiple of 16"
    return "the row is not aligned to 4 bytes" if x.storage_offset() % 2 else None


def multiply_row(
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    tile: Tile,
    block: int = 0,
    native: bool,
    overlap: bool,
    norm: Norm | None = None,
    activation: Activation | None = None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """``act(norm(x) (weight_scale W)^T + b) + residual`` of one row, which is not quantised.

    Args:
        x: ``[1, K]``, supported according to :func:`why_not_one_row`.
        weight: ``[N, K]`` in a variant of e4m3.
        weight_scale: float32 for e4m3fn values: ``[N]``, or of blocks ``[ceil(N / block), ceil(K / block)]``.
        bias: ``[N]``.
        tile: its kernel is ignored; its rows divide a block, and its columns are a multiple of 16.
        block: size of the square blocks that share a scale; 0: one scale per row.
        native: whether the device has an instruction that converts e4m3 to float16.
        overlap: see :func:`atom_core.kernels.triton_support.overlaps`.
        norm: the RMS norm to apply to ``x`` first.
        activation: the weight is ``[gate | up]``; the result is ``[1, N / 2]``.
        residual: contiguous, of the result's shape; it is added to and returned.
    """
    out_features, in_features = weight.shape
    assert x.shape == (1, in_features)
    assert (reason := why_not_one_row(x, out_features, tile, activation, block)) is None, reason
    assert x.stride(1) == weight.stride(1) == 1
    assert weight_scale.is_contiguous()
    assert block % tile.rows == 0
    assert residual is None or residual.is_contiguous()
    outputs = out_features if activation is None else out_features // 2
    y = x.new_empty(1, outputs) if residual is None else residual
    columns = min(tile.columns, next_power_of_2(in_features))
    _one_row[(cdiv(outputs, tile.rows if activation is None else tile.rows // 2),)](
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
        BLOCK=block,
        EVEN=in_features % columns == 0,
        ACTIVATION=None if activation is None else ACTIVATIONS[activation],
        UNIT=unit_of(weight.dtype),
        # Triton's interpreter runs no inline assembly.
        NATIVE=native and not triton.knobs.runtime.interpret,
        OVERLAP=overlap,
        EARLY=tile.early,
        FETCH=tile.fetched(weight, overlap),
        num_warps=tile.warps,
        **launch_options(overlap),
    )
    return y
