"""A product of FP8 experts of many tokens, whose blocks :mod:`atom_core.kernels.experts.grouped` sorts, by tensor cores
that multiply FP8.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from atom_core.kernels.experts.grouped import Blocks, finish_block, load_tiles
from atom_core.kernels.launch import entry_kernel
from atom_core.kernels.linear.helpers import weight_rows
from atom_core.kernels.linear.tiles import on_hopper, why_no_gluon
from atom_core.kernels.triton_support import cdiv, launch_options

if why_no_gluon() is None:
    from atom_core.kernels.experts.hopper import multiply_on_hopper, takes


@entry_kernel
@triton.jit(do_not_specialize=["stride_x_scales"])
def _multiply(
    x,
    x_scales,
    slots,
    block_experts,
    weights,
    weight,
    scales,
    out,
    K,
    N,
    stride_x_scales,
    stride_scales,
    TOP_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SIZE: tl.constexpr,
    EVEN: tl.constexpr,
    STAGES: tl.constexpr,
    ACTIVATION: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """A block of routed tokens of one expert by some rows of its weight.

    With an activation, rows of ``x`` are tokens and the result goes to the block's slots. Without, rows of ``x`` are
    slots, and the result, times the routing weight, goes to the routed token. ``SIZE`` is that of the weight's scale
    blocks, or 0 where each row has a scale.
    """
    GATED: tl.constexpr = ACTIVATION is not None
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    block = tl.program_id(1)
    expert = tl.load(block_experts + block).to(tl.int64)
    if expert < 0:
        return
    slot = block.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    routed_token = tl.load(slots + slot).to(tl.int64)
    used = routed_token >= 0
    row = weight_rows(N, BLOCK_N, GATED)
    column = tl.arange(0, BLOCK_K)
    x_row = routed_token // TOP_K if GATED else slot
    x_at = x + x_row[:, None] * K + column[None, :]
    at = weight + expert * N * K + row[None, :] * K + column[:, None]
    scales += expert * stride_scales
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for begin in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        left, right = load_tiles(x_at, at, used, column, begin, K, EVEN)
        if SIZE > 0:
            tl.static_assert(SIZE == BLOCK_K)
            group = begin // SIZE
            mine = tl.load(scales + row // SIZE * tl.cdiv(K, SIZE) + group)
            theirs = tl.load(x_scales + group * stride_x_scales.to(tl.int64) + x_row, mask=used, other=0.0)
            total += tl.dot(left, right) * theirs[:, None] * mine[None, :]
        else:
            total = tl.dot(left, right, total)
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
    if SIZE == 0:
        total *= tl.load(x_scales + x_row, mask=used, other=0.0)[:, None] * tl.load(scales + row)[None, :]
    finish_block(total, weights, None, out, expert, routed_token, slot, used, row, N, BLOCK_M, BLOCK_N, ACTIVATION)


def multiply_blocks(
    x: torch.Tensor,
    x_scales: torch.Tensor,
    blocks: Blocks,
    weights: torch.Tensor | None,
    weight: torch.Tensor,
    scales: torch.Tensor,
    out: torch.Tensor,
    *,
    top_k: int,
    block: int,
    activation: int | None,
    nvidia: bool,
    overlap: bool,
) -> None:
    """One product of all experts, into ``out``.

    Args:
        x: in a variant of e4m3: ``[T, K]`` with an activation, else ``[blocks x rows, K]``.
        x_scales: float32 ``[groups, rows of x]``.
        blocks: the routed tokens sorted by expert.
        weights: float32 ``[T, k]`` without an activation.
        weight: ``[E, N, K]`` in the same variant.
        scales: see :mod:`atom_core.kernels.fp8_experts`.
        out: ``[blocks x rows, N / 2]`` with an activation, else ``[T k, N]``; unused rows are not written.
        top_k: experts per token.
        block: size of the square blocks that share a scale; 0: one scale per row.
        activation: a value of ``ACTIVATIONS``, or None.
        nvidia: whether the device is NVIDIA's; others have less shared memory.
        overlap: see :func:`atom_core.kernels.triton_support.overlaps`.
    """
    if on_hopper(x.device) and takes(x, weight, blocks, block, activation is not None):
        multiply_on_hopper(
            x,
            x_scales,
            blocks,
            weights,
            weight,
            scales,
            None,
            out,
            top_k=top_k,
            block=block,
            activation=activation,
            overlap=overlap,
        )
        return
    _, rows, size = weight.shape
    columns = block or 128
    tile_rows = 128 if nvidia else 64  # 128 spill registers on AMD
    _multiply[(cdiv(rows, tile_rows), len(blocks.experts))](
        x,
        x_scales,
        blocks.slots,
        blocks.experts,
        weights,
        weight,
        scales,
        out,
        size,
        rows,
        x_scales.shape[1],
        scales[0].numel(),
        TOP_K=top_k,
        BLOCK_M=blocks.rows,
        BLOCK_N=tile_rows,
        BLOCK_K=columns,
        SIZE=block,
        EVEN=size % columns == 0,
        STAGES=4 if nvidia else 2,
        ACTIVATION=activation,
        OVERLAP=overlap,
        num_warps=4 if blocks.rows < 64 or (nvidia and block) else 8,
        **launch_options(overlap),
    )
