"""1 to 64 rows by a weight in blocks, which is read once: rows are the right operand of the product, as in
:mod:`atom_core.kernels.linear.few_rows`. The sums of each group are scaled and then added up in float32.

On Hopper :mod:`.few_rows_hopper` and :mod:`.specialized_hopper` multiply them. The latter takes up to 256 rows by small
weights, which are then read once for each 32 or 64 rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from atom_core.kernels.fp8_block_linear.hopper_tiles import (
    MOST_ROWS,
    ROWS,
    SpecializedTile,
    input_rows,
    tile_for,
)
from atom_core.kernels.gated_activation.triton_kernel import ACTIVATIONS
from atom_core.kernels.launch import entry_kernel
from atom_core.kernels.linear.helpers import finish, weight_rows
from atom_core.kernels.linear.tiles import MAX_ROWS, on_hopper
from atom_core.kernels.triton_support import cdiv, launch_options
from atom_core.quant.fp8 import BLOCK_SIZE
from atom_core.types import Activation


@entry_kernel
@triton.jit(do_not_specialize=["M", "stride_input_scales"])
def _few_rows(
    x,
    input_scales,
    weight,
    scales,
    bias,
    residual,
    y,
    M,
    N,
    K,
    stride_input_scales,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SIZE: tl.constexpr,
    EVEN: tl.constexpr,
    ACTIVATION: tl.constexpr,
    OVERLAP: tl.constexpr,
    STAGES: tl.constexpr,
):
    """A program has ``BLOCK_N`` weight rows and all rows of ``x``."""
    row = weight_rows(N, BLOCK_N, ACTIVATION is not None)
    column = tl.arange(0, SIZE)
    given = tl.arange(0, BLOCK_M)
    at = weight + row[:, None] * K + column[None, :]
    x_at = x + given.to(tl.int64)[None, :] * K + column[:, None]
    scale_at = scales + row // SIZE * tl.cdiv(K, SIZE)
    used = given < M
    total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    for begin in tl.range(0, K, SIZE, num_stages=STAGES):
        if EVEN:
            tile = tl.load(at + begin, eviction_policy="evict_first")
            right = tl.load(x_at + begin, mask=used[None, :], other=0.0)
        else:
            known = begin + column < K
            tile = tl.load(at + begin, mask=known[None, :], other=0.0, eviction_policy="evict_first")
            right = tl.load(x_at + begin, mask=used[None, :] & known[:, None], other=0.0)
        group = begin // SIZE
        mine = tl.load(scale_at + group)
        theirs = tl.load(input_scales + group * stride_input_scales + given, mask=used, other=0.0)
        total += tl.dot(tile, right) * mine[:, None] * theirs[None, :]
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
    finish(tl.trans(total), None, None, bias, residual, y, row, given, M, N, BLOCK_M, BLOCK_N, ACTIVATION)


def multiply_few_rows(
    x: torch.Tensor,
    input_scales: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    nvidia: bool,
    overlap: bool,
    dtype: torch.dtype,
    activation: Activation | None = None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """``act(x W^T + b) + residual`` for 1 to :data:`MAX_ROWS` rows, and those that :func:`takes_more` tells.

    Args:
        x: ``[M, K]`` in a variant of e4m3.
        input_scales: float32 ``[ceil(K / 128), M]``, as :func:`.quantize.quantize_groups` returns them.
        weight: ``[N, K]`` in the same variant, contiguous.
        scales: float32 ``[ceil(N / 128), ceil(K / 128)]``, for e4m3fn values.
        bias: ``[N]``.
        nvidia: whether the device is NVIDIA's; others have less shared memory.
        overlap: see :func:`atom_core.kernels.triton_support.overlaps`.
        dtype: the result's.
        activation: the weight is ``[gate | up]``; the result is ``[M, N / 2]``.
        residual: contiguous, of the result's shape; it is added to and returned.
    """
    num_rows, (out_features, in_features) = len(x), weight.shape
    assert 0 < num_rows <= MAX_ROWS or takes_more(num_rows, weight)
    assert x.dtype == weight.dtype
    assert all(it.is_contiguous() for it in (x, input_scales, weight, scales))
    assert residual is None or residual.is_contiguous()
    outputs = out_features if activation is None else out_features // 2
    y = x.new_empty(num_rows, outputs, dtype=dtype) if residual is None else residual
    if on_hopper(x.device) and in_features % BLOCK_SIZE == 0:
        _multiply_on_hopper(x, input_scales, weight, scales, bias, residual, y, activation, overlap)
        return y
    block_rows = max(16, input_rows(num_rows))
    block = 64 if nvidia else 32
    _few_rows[(cdiv(outputs, block if activation is None else block // 2),)](
        x,
        input_scales,
        weight,
        scales,
        bias,
        residual,
        y,
        num_rows,
        out_features,
        in_features,
        input_scales.shape[1],
        BLOCK_M=block_rows,
        BLOCK_N=block,
        SIZE=BLOCK_SIZE,
        EVEN=in_features % BLOCK_SIZE == 0,
        ACTIVATION=None if activation is None else ACTIVATIONS[activation],
        OVERLAP=overlap,
        # Many tiles in flight keep memory busy with few programs.
        STAGES=(8 if block_rows <= 32 else 6) if nvidia else 2,
        num_warps=4,
        **launch_options(overlap),
    )
    return y


def takes_more(num_rows: int, weight: torch.Tensor) -> bool:
    """Whether :mod:`.specialized_hopper` multiplies more than :data:`MAX_ROWS` rows by ``weight [N, K]``.

    It does where its programs run at once. cuBLAS has tiles of 128 rows, and so fewer programs: on an H200 it takes
    17.0 us for 4,096 x 4,096 and 128 rows with what quantises them, and this kernel 12.9; for 2,048 x 4,096 and 256
    rows 17.3 and 12.5.
    """
    out_features, in_features = weight.shape
    if num_rows > MOST_ROWS or in_features % BLOCK_SIZE or not on_hopper(weight.device):
        return False
    return tile_for(num_rows, out_features, False) is not None


def _multiply_on_hopper(
    x: torch.Tensor,
    input_scales: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    y: torch.Tensor,
    activation: Activation | None,
    overlap: bool,
) -> None:
    num_rows, (out_features, in_features) = len(x), weight.shape
    tile = tile_for(num_rows, out_features, activation is not None)
    assert tile is not None
    if isinstance(tile, SpecializedTile):
        # Gluon is experimental in Triton; other devices may lack it.
        from atom_core.kernels.fp8_block_linear.specialized_hopper import multiply_specialized

        given = x, input_scales, weight, scales, bias, residual, y
        multiply_specialized(*given, tile=tile, overlap=overlap)
        return
    from atom_core.kernels.fp8_block_linear.few_rows_hopper import few_rows_hopper

    few_rows_hopper[(cdiv(out_features, ROWS),)](
        x,
        input_scales,
        weight,
        scales,
        bias,
        residual,
        y,
        num_rows,
        out_features,
        in_features,
        input_scales.shape[1],
        BLOCK_M=tile.tokens,
        BLOCK_N=ROWS,
        SIZE=BLOCK_SIZE,
        ACTIVATION=None if activation is None else ACTIVATIONS[activation],
        OVERLAP=overlap,
        STAGES=tile.stages,
        TURN=tile.turn,
        num_warps=4,
        **launch_options(overlap),
    )
