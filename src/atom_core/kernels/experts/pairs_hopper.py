"""A block of pairs of one expert by some rows of its weight in 16 bits on Hopper, in Gluon, for the least energy.

Experts of some hundred tokens keep a GPU at its limit of power, and its clock below the highest: what is not done is
time. So tiles of the weight are copied by one instruction each (TMA), not by all threads' addresses, and a block in
which few pairs are multiplies by half of its places: tensor cores take rows that are zero for what they are not.

As in :mod:`.few_pairs_hopper` pairs are the right side of a matrix product, and the second product's tiles of the
weight are on their way before its input is there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from atom_core.kernels.eviction import EVICT_LAST
from atom_core.kernels.experts.few_pairs_hopper import COLUMNS
from atom_core.kernels.gated_activation.triton_kernel import gated
from atom_core.kernels.linear.few_rows_hopper import all_copied, barrier, depend, load, ready
from atom_core.kernels.linear.tiles import aligned
from atom_core.kernels.triton_support import launch_options

if TYPE_CHECKING:
    from atom_core.kernels.experts.grouped import Blocks

#: Gluon's name changed between Triton 3.6 and 3.9.
_load_tile = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
_gated = gluon.jit(gated.fn)

#: Rows of each of a program's two tiles of the weight: gates and their ups, or rows side by side.
ROWS = 64
#: Steps whose tiles shared memory has room for: with more, fewer programs share a multiprocessor.
STAGES = 3
#: Pairs of a block that this kernel multiplies.
PAIRS = (32, 64)


@gluon.jit
def _ask_weight(tiles, bars, weight, first, second, step, steps, place, TILED: gl.constexpr):
    """Ask for both tiles of a step, where there is such."""
    there = step < steps
    ROWS: gl.constexpr = tiles.shape[1]
    COLUMNS: gl.constexpr = tiles.shape[2]
    size: gl.constexpr = 2 * ROWS * COLUMNS * tiles.dtype.primitive_bitwidth // 8
    bar = bars.index(place)
    mbarrier.expect(bar, size, pred=there)
    if TILED:
        # Rows as wide as a tile, all those of one before the next one's.
        _load_tile(weight, [first * steps + step * ROWS, 0], bar, tiles.index(2 * place), pred=there)
        _load_tile(weight, [second * steps + step * ROWS, 0], bar, tiles.index(2 * place + 1), pred=there)
    else:
        _load_tile(weight, [first, step * COLUMNS], bar, tiles.index(2 * place), pred=there)
        _load_tile(weight, [second, step * COLUMNS], bar, tiles.index(2 * place + 1), pred=there)


@gluon.jit
def _twice(total):
    """``[rows, pairs]`` as the first half of twice as many pairs, where each thread has its numbers already."""
    ROWS: gl.constexpr = total.shape[0]
    PAIRS: gl.constexpr = total.shape[1]
    wide: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, 2 * PAIRS, 16])
    both = gl.join(total, gl.zeros_like(total)).permute((0, 2, 1)).reshape([ROWS, 2 * PAIRS])
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
    PAIRS: gl.constexpr,
    TAKEN: gl.constexpr,
    TILED: gl.constexpr,
    OVERLAP: gl.constexpr,
):
    """Both tiles' rows by the first ``TAKEN`` pairs of a block, ``[rows, PAIRS]`` each."""
    STAGES: gl.constexpr = inputs.shape[0]
    ROWS: gl.constexpr = tiles.shape[1]
    COLUMNS: gl.constexpr = tiles.shape[2]
    warps: gl.constexpr = gl.num_warps()
    copied: gl.constexpr = gl.BlockedLayout([1, 8], [32 * 8 // COLUMNS, COLUMNS // 8], [warps, 1], [1, 0])
    summed: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, TAKEN, 16])
    of_rows: gl.constexpr = gl.SliceLayout(1, copied)
    ahead: gl.constexpr = STAGES - 1
    slot = gl.program_id(1) * PAIRS + gl.arange(0, TAKEN, of_rows)
    pair = gl.load(slots + slot, cache_modifier=".cg")
    used = (pair >= 0)[:, None]
    x_row = slot
    if GATED:
        x_row = pair // TOP_K
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
        # Into the place of the step before, which all warps are done with.
        later = step + ahead
        _ask_weight(tiles, bars, weight, first, second, later, steps, filled, TILED)
        load(inputs.index(filled).slice(0, TAKEN, dim=0), x_at + later * COLUMNS, mask=used & (later < steps))
        async_copy.commit_group()
        place += 1
        if place == STAGES:
            place = 0
            phase ^= 1
        filled = (filled + 1) % STAGES
        one, other = warpgroup_mma_wait(0, [one, other])
    all_copied()
    if TAKEN < PAIRS:
        one, other = _twice(one), _twice(other)
    return one, other


@gluon.jit
def _store(total, out, to, row, pair, width):
    """Store ``total [rows, pairs]`` at columns ``to`` of the result's rows, of pairs alone."""
    known = (pair >= 0)[None, :] & (to < width)[:, None]
    gl.store(out + row.to(gl.int64)[None, :] * width + to[:, None], total, mask=known, eviction_policy=EVICT_LAST)


@gluon.jit
def pairs_hopper(
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
    PAIRS: gl.constexpr,
    STAGES: gl.constexpr,
    ACTIVATION: gl.constexpr,
    TILED: gl.constexpr,
    OVERLAP: gl.constexpr,
):
    """A block of ``PAIRS`` pairs of one expert by two tiles of its weight; see :func:`multiply_pairs`.

    With an activation rows of ``x`` are tokens, and rows of ``out`` slots; without, the other way round, and results
    are given their pair's weight.
    """
    GATED: gl.constexpr = ACTIVATION is not None
    dtype: gl.constexpr = x.dtype.element_ty
    ROWS: gl.constexpr = weight.block_type.shape[0]
    COLUMNS: gl.constexpr = weight.block_type.shape[1]
    FEW: gl.constexpr = PAIRS // 2
    warps: gl.constexpr = gl.num_warps()
    if OVERLAP and GATED:
        depend("griddepcontrol.wait; // $0")
    block = gl.program_id(1)
    # Of the second product, sorted before the first began; the first-level cache may still have what was there before.
    expert = gl.load(block_experts + block, cache_modifier=".cg")
    if expert < 0:
        # One waits though it has nothing to do, so that whoever waits for this kernel waits for those in front as well.
        if OVERLAP and not GATED and gl.program_id(0) + block == 0:
            depend("griddepcontrol.wait; // $0")
        return
    behind_few = gl.load(slots + block * PAIRS + FEW, cache_modifier=".cg")
    tiles = gl.allocate_shared_memory(dtype, [2 * STAGES, ROWS, COLUMNS], weight.layout)
    inputs = gl.allocate_shared_memory(
        dtype, [STAGES, PAIRS, COLUMNS], gl.NVMMASharedLayout.get_default_for([PAIRS, COLUMNS], dtype)
    )
    bars = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(bars.index(stage), count=1)
    fence_async_shared()
    barrier()
    width = N // 2 if GATED else N
    from_row = gl.program_id(0) * (ROWS if GATED else 2 * ROWS)
    apart = width if GATED else ROWS
    # Behind an expert's last row is the next one's first, behind all of them zeros: neither is stored.
    first = expert * N + from_row
    steps = K // COLUMNS
    second = first + apart
    for stage in gl.static_range(STAGES - 1):
        _ask_weight(tiles, bars, weight, first, second, stage, steps, stage, TILED)
    if behind_few < 0:
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
            PAIRS,
            FEW,
            TILED,
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
            PAIRS,
            PAIRS,
            TILED,
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
    slot = block * PAIRS + gl.arange(0, PAIRS, gl.SliceLayout(0, stored))
    pair = gl.load(slots + slot, cache_modifier=".cg")
    to = from_row + gl.arange(0, ROWS, gl.SliceLayout(1, stored))
    if GATED:
        # Rounded where a kernel of its own would read them.
        gate = one.to(dtype).to(gl.float32)
        up = other.to(dtype).to(gl.float32)
        _store(gl.convert_layout(_gated(gate, up, ACTIVATION).to(dtype), stored), out, to, slot, pair, width)
    else:
        mine = gl.load(slots + block * PAIRS + gl.arange(0, PAIRS, gl.SliceLayout(0, of_sum)), cache_modifier=".cg")
        share = gl.load(weights + mine, mask=mine >= 0, other=0.0)[None, :]
        _store(gl.convert_layout((one * share).to(dtype), stored), out, to, pair, pair, width)
        _store(gl.convert_layout((other * share).to(dtype), stored), out, to + ROWS, pair, pair, width)


def takes_pairs(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether on Hopper blocks of up to 64 pairs are multiplied by :func:`multiply_pairs`, of 16 by that of few."""
    return (
        weight.itemsize == x.itemsize == 2
        and weight.shape[2] % COLUMNS == 0
        and aligned(x)
        and weight.data_ptr() % 16 == 0
        and weight.numel() // COLUMNS < 2**31
    )


def multiply_pairs(
    x: torch.Tensor,
    weights: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    blocks: Blocks,
    *,
    top_k: int,
    activation: int | None,
    tiled: bool,
    overlap: bool,
) -> None:
    """As :func:`atom_core.kernels.experts.few_pairs_hopper.multiply_few_pairs`, of blocks of 32 and 64 pairs."""
    assert blocks.rows in PAIRS
    _, out_features, in_features = weight.shape
    layout = gl.NVMMASharedLayout.get_default_for(
        [ROWS, COLUMNS], gl.bfloat16 if weight.dtype == torch.bfloat16 else gl.float16
    )
    columns = COLUMNS if tiled else in_features
    rows = TensorDescriptor(weight, [weight.numel() // columns, columns], [columns, 1], [ROWS, COLUMNS], layout)
    pairs_hopper[triton.cdiv(out_features, 2 * ROWS), len(blocks.experts)](
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
        PAIRS=blocks.rows,
        STAGES=STAGES,
        ACTIVATION=activation,
        TILED=tiled,
        OVERLAP=overlap,
        num_warps=4,
        **launch_options(overlap),
    )
