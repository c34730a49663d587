"""Blocks of 32 or 64 routed tokens of one expert in 16 bits on Hopper, in Gluon, with the least energy.

Experts with some hundred tokens keep a GPU at its power limit and below its highest clock, so less work per product
saves time. A single instruction (TMA) copies a weight tile, instead of addresses of all threads. A block that is at
most half full multiplies only half of its slots: tensor cores would multiply the zeros of unused slots as well.

As in :mod:`.few_routed_tokens_hopper`, routed tokens are the right operand, and the second product loads its first
weight tiles before its input is ready.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from atom_core.kernels.eviction import EVICT_LAST
from atom_core.kernels.experts.few_routed_tokens_hopper import COLUMNS
from atom_core.kernels.gated_activation.triton_kernel import gated
from atom_core.kernels.launch import entry_kernel
from atom_core.kernels.linear.few_rows_hopper import all_copied, barrier, depend, load, load_tile, ready
from atom_core.kernels.linear.tiles import aligned
from atom_core.kernels.triton_support import cdiv, launch_options

if TYPE_CHECKING:
    from atom_core.kernels.experts.grouped import Blocks

_gated = gluon.jit(gated.fn)

#: Rows of each of a program's two weight tiles: gate and up rows, or adjacent rows.
ROWS = 64
#: Pipeline stages in shared memory; with more, fewer programs share a multiprocessor.
STAGES = 3
#: Block sizes that this kernel supports.
BLOCK_SIZES = (32, 64)


@gluon.jit
def _ask_weight(tiles, bars, weight, first, second, step, steps, place, BLOCKED: gl.constexpr):
    """Start to copy both tiles of a step, if the step exists."""
    there = step < steps
    ROWS: gl.constexpr = tiles.shape[1]
    COLUMNS: gl.constexpr = tiles.shape[2]
    size: gl.constexpr = 2 * ROWS * COLUMNS * tiles.dtype.primitive_bitwidth // 8
    bar = bars.index(place)
    mbarrier.expect(bar, size, pred=there)
    if BLOCKED:
        # As a matrix whose rows are as wide as a block: all rows of one block come before those of the next.
        load_tile(weight, [first * steps + step * ROWS, 0], bar, tiles.index(2 * place), pred=there)
        load_tile(weight, [second * steps + step * ROWS, 0], bar, tiles.index(2 * place + 1), pred=there)
    else:
        load_tile(weight, [first, step * COLUMNS], bar, tiles.index(2 * place), pred=there)
        load_tile(weight, [second, step * COLUMNS], bar, tiles.index(2 * place + 1), pred=there)


@gluon.jit
def _twice(total):
    """``[rows, TOKENS]`` zero-padded to ``[rows, 2 TOKENS]``; each thread already has its elements."""
    ROWS: gl.constexpr = total.shape[0]
    TOKENS: gl.constexpr = total.shape[1]
    wide: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, 2 * TOKENS, 16])
    both = gl.join(total, gl.zeros_like(total)).permute((0, 2, 1)).reshape([ROWS, 2 * TOKENS])
    return gl.convert_layout(both, wide, assert_trivial=True)


@gluon.jit
def _sums(
    x,
    slots,
    weight,
    tiles,
    inputs,
    bars,
    first,
    second,
    stride_x,
    steps,
    GATED: gl.constexpr,
    TOP_K: gl.constexpr,
    TOKENS: gl.constexpr,
    TAKEN: gl.constexpr,
    BLOCKED: gl.constexpr,
    OVERLAP: gl.constexpr,
):
    """Both tiles' rows by the first ``TAKEN`` routed tokens of a block, ``[rows, TOKENS]`` each."""
    STAGES: gl.constexpr = inputs.shape[0]
    ROWS: gl.constexpr = tiles.shape[1]
    COLUMNS: gl.constexpr = tiles.shape[2]
    warps: gl.constexpr = gl.num_warps()
    copied: gl.constexpr = gl.BlockedLayout([1, 8], [32 * 8 // COLUMNS, COLUMNS // 8], [warps, 1], [1, 0])
    summed: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, TAKEN, 16])
    of_rows: gl.constexpr = gl.SliceLayout(1, copied)
    ahead: gl.constexpr = STAGES - 1
    slot = gl.program_id(1) * TOKENS + gl.arange(0, TAKEN, of_rows)
    routed_token = gl.load(slots + slot, cache_modifier=".cg")
    used = (routed_token >= 0)[:, None]
    x_row = slot
    if GATED:
        x_row = routed_token // TOP_K
    x_at = x + x_row.to(gl.int64)[:, None] * stride_x + gl.arange(0, COLUMNS, gl.SliceLayout(0, copied))[None, :]
    if OVERLAP and not GATED:
        depend("griddepcontrol.wait; // $0")
    for stage in gl.static_range(ahead):
        load(inputs.index(stage).slice(0, TAKEN, dim=0), x_at + stage * COLUMNS, mask=used & (stage < steps))
        async_copy.commit_group()
    one = gl.zeros([ROWS, TAKEN], gl.float32, summed)
    other = gl.zeros([ROWS, TAKEN], gl.float32, summed)
    place = 0
    phase = 0
    filled = ahead
    for step in range(steps):
        mbarrier.wait(bars.index(place), phase)
        ready(ahead - 1)
        right = inputs.index(place).slice(0, TAKEN, dim=0).permute((1, 0))
        one = warpgroup_mma(tiles.index(2 * place), right, one, is_async=True)
        other = warpgroup_mma(tiles.index(2 * place + 1), right, other, is_async=True)
        # Into the stage of the previous step, which all warps have finished.
        later = step + ahead
        _ask_weight(tiles, bars, weight, first, second, later, steps, filled, BLOCKED)
        load(inputs.index(filled).slice(0, TAKEN, dim=0), x_at + later * COLUMNS, mask=used & (later < steps))
        async_copy.commit_group()
        place += 1
        if place == STAGES:
            place = 0
            phase ^= 1
        filled = (filled + 1) % STAGES
        one, other = warpgroup_mma_wait(0, [one, other])
    all_copied()
    if TAKEN < TOKENS:
        one, other = _twice(one), _twice(other)
    return one, other


@gluon.jit
def _store(total, out, to, row, routed_token, width):
    """Store ``total [rows, TOKENS]`` at columns ``to`` of rows ``row`` of ``out``, except for unused slots."""
    known = (routed_token >= 0)[None, :] & (to < width)[:, None]
    gl.store(out + row.to(gl.int64)[None, :] * width + to[:, None], total, mask=known, eviction_policy=EVICT_LAST)


@entry_kernel
@gluon.jit
def routed_tokens_hopper(
    x,
    block_experts,
    slots,
    weights,
    weight,
    bias,
    out,
    K,
    N,
    stride_x,
    TOP_K: gl.constexpr,
    TOKENS: gl.constexpr,
    STAGES: gl.constexpr,
    ACTIVATION: gl.constexpr,
    BLOCKED: gl.constexpr,
    OVERLAP: gl.constexpr,
):
    """A block of ``TOKENS`` routed tokens of one expert by two tiles of its weight; see :func:`multiply_routed_tokens`.

    With an activation, rows of ``x`` are tokens and rows of ``out`` are slots. Without, rows of ``x`` are slots, rows
    of ``out`` are routed tokens, and results are multiplied by the routing weight.
    """
    GATED: gl.constexpr = ACTIVATION is not None
    dtype: gl.constexpr = x.dtype.element_ty
    ROWS: gl.constexpr = weight.block_type.shape[0]
    COLUMNS: gl.constexpr = weight.block_type.shape[1]
    FEW: gl.constexpr = TOKENS // 2
    warps: gl.constexpr = gl.num_warps()
    if OVERLAP and GATED:
        depend("griddepcontrol.wait; // $0")
    block = gl.program_id(1)
    # For the second product, sorted before the first started, but the L1 cache may have older values.
    expert = gl.load(block_experts + block, cache_modifier=".cg")
    if expert < 0:
        # One program waits anyway, so that kernels that wait for this one also wait for those before it.
        if OVERLAP and not GATED and gl.program_id(0) + block == 0:
            depend("griddepcontrol.wait; // $0")
        return
    after_few = gl.load(slots + block * TOKENS + FEW, cache_modifier=".cg")
    tiles = gl.allocate_shared_memory(dtype, [2 * STAGES, ROWS, COLUMNS], weight.layout)
    inputs = gl.allocate_shared_memory(
        dtype, [STAGES, TOKENS, COLUMNS], gl.NVMMASharedLayout.get_default_for([TOKENS, COLUMNS], dtype)
    )
    bars = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(bars.index(stage), count=1)
    fence_async_shared()
    barrier()
    width = N // 2 if GATED else N
    from_row = gl.program_id(0) * (ROWS if GATED else 2 * ROWS)
    apart = width if GATED else ROWS
    # Rows past an expert's last are the next expert's, or zeros after the last expert; they are not stored.
    first = expert * N + from_row
    steps = K // COLUMNS
    second = first + apart
    for stage in gl.static_range(STAGES - 1):
        _ask_weight(tiles, bars, weight, first, second, stage, steps, stage, BLOCKED)
    if after_few < 0:
        one, other = _sums(
            x,
            slots,
            weight,
            tiles,
            inputs,
            bars,
            first,
            second,
            stride_x,
            steps,
            GATED,
            TOP_K,
            TOKENS,
            FEW,
            BLOCKED,
            OVERLAP,
        )
    else:
        one, other = _sums(
            x,
            slots,
            weight,
            tiles,
            inputs,
            bars,
            first,
            second,
            stride_x,
            steps,
            GATED,
            TOP_K,
            TOKENS,
            TOKENS,
            BLOCKED,
            OVERLAP,
        )
    if OVERLAP:
        depend("griddepcontrol.launch_dependents; // $0")

    of_sum: gl.constexpr = one.type.layout
    if bias is not None:
        row = from_row + gl.arange(0, ROWS, gl.SliceLayout(1, of_sum))
        bias += expert * N
        one += gl.load(bias + row, mask=row < width, other=0.0).to(gl.float32)[:, None]
        row += apart
        other += gl.load(bias + row, mask=row < N, other=0.0).to(gl.float32)[:, None]
    # A thread stores 16 bytes.
    stored: gl.constexpr = gl.BlockedLayout([8, 1], [8, 4], [1, warps], [0, 1])
    slot = block * TOKENS + gl.arange(0, TOKENS, gl.SliceLayout(0, stored))
    routed_token = gl.load(slots + slot, cache_modifier=".cg")
    to = from_row + gl.arange(0, ROWS, gl.SliceLayout(1, stored))
    if GATED:
        # Rounded as if the activation were a kernel of its own.
        gate = one.to(dtype).to(gl.float32)
        up = other.to(dtype).to(gl.float32)
        _store(gl.convert_layout(_gated(gate, up, ACTIVATION).to(dtype), stored), out, to, slot, routed_token, width)
    else:
        mine = gl.load(slots + block * TOKENS + gl.arange(0, TOKENS, gl.SliceLayout(0, of_sum)), cache_modifier=".cg")
        share = gl.load(weights + mine, mask=mine >= 0, other=0.0)[None, :]
        _store(gl.convert_layout((one * share).to(dtype), stored), out, to, routed_token, routed_token, width)
        _store(gl.convert_layout((other * share).to(dtype), stored), out, to + ROWS, routed_token, routed_token, width)


def takes_routed_tokens(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether this file and :mod:`.few_routed_tokens_hopper` support blocks of up to 64 routed tokens on Hopper."""
    return (
        weight.itemsize == x.itemsize == 2
        and weight.shape[2] % COLUMNS == 0
        and aligned(x)
        and weight.data_ptr() % 16 == 0
        and weight.numel() // COLUMNS < 2**31
    )


@functools.lru_cache
def _layout(dtype: torch.dtype) -> gl.NVMMASharedLayout:
    """A weight tile's in shared memory; to make one takes as long as a launch."""
    return gl.NVMMASharedLayout.get_default_for([ROWS, COLUMNS], gl.bfloat16 if dtype == torch.bfloat16 else gl.float16)


def multiply_routed_tokens(
    x: torch.Tensor,
    weights: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    blocks: Blocks,
    *,
    top_k: int,
    activation: int | None,
    blocked: bool,
    overlap: bool,
) -> None:
    """As :func:`.few_routed_tokens_hopper.multiply_few_routed_tokens`, for blocks of 32 or 64."""
    assert blocks.rows in BLOCK_SIZES
    _, out_features, in_features = weight.shape
    columns = COLUMNS if blocked else in_features
    rows = TensorDescriptor(
        weight, [weight.numel() // columns, columns], [columns, 1], [ROWS, COLUMNS], _layout(weight.dtype)
    )
    routed_tokens_hopper[cdiv(out_features, 2 * ROWS), len(blocks.experts)](
        x,
        blocks.experts,
        blocks.slots,
        weights,
        rows,
        bias,
        out,
        in_features,
        out_features,
        x.stride(0),
        TOP_K=top_k,
        TOKENS=blocks.rows,
        STAGES=STAGES,
        ACTIVATION=activation,
        BLOCKED=blocked,
        OVERLAP=overlap,
        num_warps=4,
        **launch_options(overlap),
    )
