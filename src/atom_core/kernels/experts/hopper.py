"""A block of pairs of one expert by some rows of its weight on Hopper, in Gluon, for tiles that keep tensor cores busy.

Rows of the input are gathered to shared memory as they are copied (``cp.async``), those of the weight likewise;
``wgmma`` takes both from there, and one is always at work while the next is asked for. With scales of blocks the sums
of a group are scaled while the next group is multiplied: two tiles of sums take turns.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    warpgroup_mma,
    warpgroup_mma_wait,
)

from atom_core.kernels.eviction import EVICT_LAST
from atom_core.kernels.experts import tiled as tiles_in_memory
from atom_core.kernels.experts.tiled import FAR
from atom_core.kernels.gated_activation.triton_kernel import gated
from atom_core.kernels.linear.few_rows_hopper import LAG, activated, all_copied, depend, load, ready
from atom_core.kernels.linear.tiles import aligned
from atom_core.kernels.triton_support import launch_options

if TYPE_CHECKING:
    from atom_core.kernels.experts.grouped import Blocks

_gated = gluon.jit(gated.fn)
row_at, column_at = gluon.jit(tiles_in_memory.row_at.fn), gluon.jit(tiles_in_memory.column_at.fn)

#: Bytes of a row that are copied together: what shared memory interleaves.
_LINE = 128


@gluon.jit
def sorted_pairs(block_experts, slots, TOKENS: gl.constexpr, layout: gl.constexpr):
    """The expert of this block, -1 where there is nothing to do, and ``[TOKENS]`` its pairs, in a layout; -1: none."""
    block = gl.program_id(1)
    place = gl.arange(0, TOKENS, layout)
    # Sorted before the kernel in front began; the first-level cache may still have what was there before.
    expert = gl.load(block_experts + block, cache_modifier=".cg")
    pair = gl.load(slots + block * TOKENS + place, cache_modifier=".cg")
    return expert, pair


@gluon.jit
def pairs_of_block(
    experts,
    block_experts,
    slots,
    T,
    FIRST: gl.constexpr,
    COUNT: gl.constexpr,
    TOP_K: gl.constexpr,
    PLACES: gl.constexpr,
    TOKENS: gl.constexpr,
    layout: gl.constexpr,
):
    """As :func:`sorted_pairs`; without ``slots`` a block is a pair's, and is done where that is its expert's first."""
    of_token: gl.constexpr = gl.SliceLayout(1, layout)
    if slots is not None:
        expert, pair = sorted_pairs(block_experts, slots, TOKENS, of_token)
    else:
        block = gl.program_id(1)
        token = gl.arange(0, TOKENS, of_token)
        # As they, chosen before the kernel in front began.
        expert = gl.load(experts + block, cache_modifier=".cg")
        place = gl.arange(0, PLACES, gl.SliceLayout(0, layout))
        chosen = (token < T)[:, None] & (place < TOP_K)[None, :]
        at = experts + token[:, None] * TOP_K + place[None, :]
        others = gl.load(at, mask=chosen, other=FIRST - 1, cache_modifier=".cg")
        # A token goes to an expert once.
        mine = gl.max(gl.where(chosen & (others == expert), place[None, :] + 1, 0), 1) - 1
        pair = gl.where(mine >= 0, token * TOP_K + mine, -1)
        first = gl.min(gl.where(mine >= 0, pair, TOKENS * TOP_K), 0)
        expert -= FIRST
        if (expert >= COUNT) | (first < block):
            expert = expert * 0 - 1
    return expert, pair


@gluon.jit
def input_rows(
    pair, SORTED: gl.constexpr, GATED: gl.constexpr, TOP_K: gl.constexpr, TOKENS: gl.constexpr, layout: gl.constexpr
):
    """The input's row of each of a block's pairs, in their layout: tokens, or what :func:`store_pairs` left of them."""
    row = pair
    if GATED:
        row = pair // TOP_K
    elif SORTED:
        row = gl.program_id(1) * TOKENS + gl.arange(0, TOKENS, layout)
    return row


@gluon.jit
def store_pairs(
    total,
    pair,
    weights,
    out,
    N,
    SORTED: gl.constexpr,
    SPLIT: gl.constexpr,
    BLOCK_N: gl.constexpr,
    TOKENS: gl.constexpr,
    ACTIVATION: gl.constexpr,
):
    """Activate ``total [BLOCK_N, TOKENS]`` of pairs ``[TOKENS]``, or give it their weights, and store it.

    An activated block that is ``SORTED`` goes where it is, all else where its pairs are; ``SPLIT``: the first of each
    four numbers of a row are stored in front, then the second.
    """
    GATED: gl.constexpr = ACTIVATION is not None
    warps: gl.constexpr = gl.num_warps()
    out_dtype: gl.constexpr = out.dtype.element_ty
    width = N
    WIDTH: gl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    if GATED:
        width = N // 2
        total = activated(total, BLOCK_N, TOKENS, ACTIVATION, out_dtype)
    stored: gl.constexpr = gl.BlockedLayout([1, 1], [32, 1], [1, warps], [0, 1])
    result = gl.convert_layout(total, stored)
    to = gl.program_id(0) * WIDTH + gl.arange(0, WIDTH, gl.SliceLayout(1, stored))
    out_pair = gl.convert_layout(pair, gl.SliceLayout(0, stored))
    out_row = out_pair
    if GATED and SORTED:
        out_row = gl.program_id(1) * TOKENS + gl.arange(0, TOKENS, gl.SliceLayout(0, stored))
    if not GATED:
        result *= gl.load(weights + out_pair, mask=out_pair >= 0, other=0.0)[None, :]
    known = (out_pair >= 0)[None, :] & (to < width)[:, None]
    if SPLIT:
        to = to % 4 * (width // 4) + to // 4
    gl.store(
        out + out_row.to(gl.int64)[None, :] * width + to[:, None],
        result.to(out_dtype),
        mask=known,
        eviction_policy=EVICT_LAST,
    )


@gluon.jit
def _weight_rows(lane, N, BLOCK_N: gl.constexpr, GATED: gl.constexpr):
    """The weight's rows in the order of a tile: gates, then as many of up; past the last, the last again."""
    if GATED:
        half = N // 2
        row = gl.program_id(0) * (BLOCK_N // 2) + lane % (BLOCK_N // 2)
        row = gl.minimum(row, half - 1) + lane // (BLOCK_N // 2) * half
    else:
        row = gl.minimum(gl.program_id(0) * BLOCK_N + lane, N - 1)
    return row


@gluon.jit
def _next_tile(inputs, tiles, x_at, weight, at, used, step, steps, place, BLOCK_K: gl.constexpr, apart: gl.constexpr):
    """Ask for the tiles of a step, where there is such: by a mask, as behind a branch ``wgmma`` would be waited for."""
    there = step < steps
    load(inputs.index(place), x_at + step * BLOCK_K, mask=used & there)
    load(tiles.index(place), weight + step * apart + at, mask=there)
    async_copy.commit_group()


@gluon.jit
def _begin(inputs, tiles, zeros, place):
    """Begin the product of the tiles in a place."""
    return warpgroup_mma(inputs.index(place), tiles.index(place).permute((1, 0)), zeros, use_acc=False, is_async=True)


@gluon.jit
def _factors(x_scales, used, first, second, step, stride_x_scales, steps):
    """What sums of a group are multiplied by, ``[BLOCK_M]``: of the first rows, or gates, and of up."""
    here = gl.minimum(step, steps - 1)
    theirs = gl.load(x_scales + here * stride_x_scales, mask=used, other=0.0)
    return theirs * gl.load(first + here), theirs * gl.load(second + here)


@gluon.jit
def _scaled(part, of_first, of_second, column, BLOCK_N: gl.constexpr, GATED: gl.constexpr):
    if GATED:
        return part * gl.where((column < BLOCK_N // 2)[None, :], of_first[:, None], of_second[:, None])
    else:  # noqa: RET505 - decided when compiling, and what stands behind a return would be compiled all the same
        return part * of_first[:, None]


@gluon.jit(do_not_specialize=["stride_x_scales", "first_expert", "count"])
def grouped_rows_hopper(
    x,
    x_scales,
    slots,
    block_experts,
    weights,
    weight,
    scales,
    bias,
    out,
    K,
    N,
    stride_x,
    stride_x_scales,
    stride_scales,
    first_expert,
    count,
    TOP_K: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    SIZE: gl.constexpr,
    STAGES: gl.constexpr,
    LAG: gl.constexpr,
    ACTIVATION: gl.constexpr,
    TILED: gl.constexpr,
    OVERLAP: gl.constexpr,
):
    """``BLOCK_M`` pairs by ``BLOCK_N`` rows of their expert's weight; see :func:`multiply_on_hopper`.

    With an activation rows of ``x`` are those of the pairs' tokens, and the result goes where the block is; without,
    rows of ``x`` are the block's, and the result, times the pair's weight, goes where the pair is.
    """
    GATED: gl.constexpr = ACTIVATION is not None
    dtype: gl.constexpr = weight.dtype.element_ty
    out_dtype: gl.constexpr = out.dtype.element_ty
    bits: gl.constexpr = dtype.primitive_bitwidth
    vector: gl.constexpr = 128 // bits
    across: gl.constexpr = BLOCK_K // vector
    warps: gl.constexpr = gl.num_warps()
    copied: gl.constexpr = gl.BlockedLayout([1, vector], [32 // across, across], [warps, 1], [1, 0])
    summed: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, BLOCK_N, 256 // bits])
    of_rows: gl.constexpr = gl.SliceLayout(1, summed)
    ahead: gl.constexpr = STAGES - LAG
    if OVERLAP:
        depend("griddepcontrol.wait; // $0")
    block = gl.program_id(1)
    expert = gl.load(block_experts + block).to(gl.int64) - first_expert
    if (expert < 0) | (expert >= count):
        return
    inputs = gl.allocate_shared_memory(
        dtype, [STAGES, BLOCK_M, BLOCK_K], gl.NVMMASharedLayout.get_default_for([BLOCK_M, BLOCK_K], dtype)
    )
    tiles = gl.allocate_shared_memory(
        dtype, [STAGES, BLOCK_N, BLOCK_K], gl.NVMMASharedLayout.get_default_for([BLOCK_N, BLOCK_K], dtype)
    )
    column = gl.arange(0, BLOCK_K, gl.SliceLayout(0, copied))
    slot = block * BLOCK_M + gl.arange(0, BLOCK_M, gl.SliceLayout(1, copied))
    pair = gl.load(slots + slot)
    used = (pair >= 0)[:, None]
    x_row = slot
    if GATED:
        x_row = pair // TOP_K
    x_at = x + x_row.to(gl.int64)[:, None] * stride_x + column[None, :]
    row = _weight_rows(gl.arange(0, BLOCK_N, gl.SliceLayout(1, copied)), N, BLOCK_N, GATED)
    weight += expert * N * K
    at = row_at(row, K, TILED)[:, None] + column[None, :]
    # Tiles that lie together in memory are in 16 bits, and so as wide as these.
    apart: gl.constexpr = BLOCK_K * FAR if TILED else BLOCK_K
    steps = K // BLOCK_K
    for stage in gl.static_range(ahead):
        _next_tile(inputs, tiles, x_at, weight, at, used, stage, steps, stage, BLOCK_K, apart)

    # The same of the sums.
    sum_slot = block * BLOCK_M + gl.arange(0, BLOCK_M, of_rows)
    sum_pair = gl.load(slots + sum_slot)
    sum_used = sum_pair >= 0
    sum_x = sum_slot
    if GATED:
        sum_x = sum_pair // TOP_K
    lane = gl.arange(0, BLOCK_N, gl.SliceLayout(0, summed))
    zeros = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, summed)
    total = zeros
    place = 0
    filled = ahead
    if SIZE > 0:
        gl.static_assert(SIZE == BLOCK_K)
        gl.static_assert(LAG == 2)
        scales += expert * stride_scales
        x_scales += sum_x
        # All rows of a tile, or of a half of it, have the same scale.
        first_row = gl.program_id(0) * BLOCK_N
        second = scales
        if GATED:
            first_row = gl.program_id(0) * (BLOCK_N // 2)
            second = scales + (first_row + N // 2) // SIZE * steps
        first = scales + first_row // SIZE * steps
        even_first, even_second = _factors(x_scales, sum_used, first, second, 0, stride_x_scales, steps)
        odd_first, odd_second = _factors(x_scales, sum_used, first, second, 1, stride_x_scales, steps)
        for step in range(0, steps - 1, 2):
            ready(ahead - 2)
            even = _begin(inputs, tiles, zeros, place)
            place = (place + 1) % STAGES
            odd = _begin(inputs, tiles, zeros, place)
            place = (place + 1) % STAGES
            _next_tile(inputs, tiles, x_at, weight, at, used, step + ahead, steps, filled, BLOCK_K, apart)
            filled = (filled + 1) % STAGES
            _next_tile(inputs, tiles, x_at, weight, at, used, step + 1 + ahead, steps, filled, BLOCK_K, apart)
            filled = (filled + 1) % STAGES
            even_first_ahead, even_second_ahead = _factors(
                x_scales, sum_used, first, second, step + 2, stride_x_scales, steps
            )
            odd_first_ahead, odd_second_ahead = _factors(
                x_scales, sum_used, first, second, step + 3, stride_x_scales, steps
            )
            even = warpgroup_mma_wait(1, [even])
            total += _scaled(even, even_first, even_second, lane, BLOCK_N, GATED)
            odd = warpgroup_mma_wait(0, [odd])
            total += _scaled(odd, odd_first, odd_second, lane, BLOCK_N, GATED)
            even_first, even_second = even_first_ahead, even_second_ahead
            odd_first, odd_second = odd_first_ahead, odd_second_ahead
        if steps % 2 == 1:
            ready(ahead - 1)
            last = _begin(inputs, tiles, zeros, place)
            last = warpgroup_mma_wait(0, [last])
            total += _scaled(last, even_first, even_second, lane, BLOCK_N, GATED)
    else:
        for step in range(steps):
            ready(ahead - 1)
            total = warpgroup_mma(inputs.index(place), tiles.index(place).permute((1, 0)), total, is_async=True)
            _next_tile(inputs, tiles, x_at, weight, at, used, step + ahead, steps, filled, BLOCK_K, apart)
            place = (place + 1) % STAGES
            filled = (filled + 1) % STAGES
            total = warpgroup_mma_wait(LAG - 1, [total])
        total = warpgroup_mma_wait(0, [total])
    all_copied()
    if OVERLAP:
        depend("griddepcontrol.launch_dependents; // $0")
    sum_row = _weight_rows(lane, N, BLOCK_N, GATED)
    if SIZE == 0 and scales is not None:
        total *= gl.load(x_scales + sum_x, mask=sum_used, other=0.0)[:, None]
        total *= gl.load(scales + expert * stride_scales + sum_row)[None, :]
    if bias is not None:
        total += gl.load(bias + expert * N + sum_row).to(gl.float32)[None, :]
    width = N
    WIDTH: gl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    if GATED:
        width = N // 2
        gate, up = gl.split(total.reshape([BLOCK_M, 2, WIDTH]).permute([0, 2, 1]))
        # Rounded where a kernel of its own would read them.
        gate = gate.to(out_dtype).to(gl.float32)
        up = up.to(out_dtype).to(gl.float32)
        total = _gated(gate, up, ACTIVATION)
    else:
        total *= gl.load(weights + sum_pair, mask=sum_used, other=0.0)[:, None]
    stored: gl.constexpr = gl.BlockedLayout([1, 8], [32 * 8 // WIDTH, WIDTH // 8], [warps, 1], [1, 0])
    result = gl.convert_layout(total.to(out_dtype), stored)
    out_slot = block * BLOCK_M + gl.arange(0, BLOCK_M, gl.SliceLayout(1, stored))
    out_pair = gl.load(slots + out_slot)
    out_row = out_pair
    if GATED:
        out_row = out_slot
    to = gl.program_id(0) * WIDTH + gl.arange(0, WIDTH, gl.SliceLayout(0, stored))
    known = (out_pair >= 0)[:, None] & (to < width)[None, :]
    gl.store(out + out_row.to(gl.int64)[:, None] * width + to[None, :], result, mask=known, eviction_policy=EVICT_LAST)


@dataclass(frozen=True)
class Tile:
    """What one program takes; on an H200 the best of some eight for experts of Qwen3 30B-A3B."""

    pairs: int
    """A block's."""
    rows: int
    """Of the weight."""
    stages: int
    """How many tiles shared memory has room for."""
    warps: int


#: With scales of blocks two programs share a processor, so that one multiplies while the other scales.
_SCALED, _PLAIN = Tile(64, 128, 4, 4), Tile(128, 256, 4, 8)


def takes(x: torch.Tensor, weight: torch.Tensor, blocks: Blocks, block: int, gated: bool) -> bool:
    """Whether on Hopper :func:`multiply_on_hopper` has a kernel for this product."""
    return (
        blocks.rows == (_SCALED if block else _PLAIN).pairs
        and weight.itemsize <= 2
        and weight.shape[2] * weight.itemsize % _LINE == 0
        and aligned(x)
        and weight.data_ptr() % 16 == 0
        and weight[0].numel() < 2**31
        # Half of a tile are gates, with scales of their own.
        and not (block and gated and weight.shape[1] // 2 % (block // 2))
    )


def multiply_on_hopper(
    x: torch.Tensor,
    x_scales: torch.Tensor | None,
    blocks: Blocks,
    weights: torch.Tensor | None,
    weight: torch.Tensor,
    scales: torch.Tensor | None,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    *,
    top_k: int,
    block: int,
    activation: int | None,
    overlap: bool,
    first: int = 0,
    tiled: bool = False,
) -> None:
    """One product of experts into ``out``.

    Args:
        x: ``[T, K]`` with an activation, else ``[blocks x rows, K]``; of 16 bits or a form of e4m3.
        x_scales: float32 ``[groups, rows of x]``, of FP8.
        blocks: the pairs in the order of their experts.
        weights: float32 ``[T, k]`` without an activation.
        weight: ``[E, N, K]`` in the dtype of ``x``, of the experts from ``first`` on; blocks of others are left out.
        scales: see :mod:`atom_core.kernels.fp8_experts`.
        bias: ``[E, N]``.
        out: ``[blocks x rows, N / 2]`` with an activation, else ``[T k, N]``; rows of no pair are left as they are.
        top_k: experts of a token.
        block: rows and columns that have one scale; 0: each row has one.
        activation: one of ``ACTIVATIONS``' numbers, or None.
        overlap: see :func:`atom_core.kernels.triton_support.overlaps`.
        first: the place, among the experts that blocks name, of the first of ``weight``.
        tiled: whether the weight's numbers, of 16 bits, are where :mod:`.tiled` moves them.
    """
    count, out_features, in_features = weight.shape
    tile = _SCALED if block else _PLAIN
    grouped_rows_hopper[(triton.cdiv(out_features, tile.rows), len(blocks.experts))](
        x,
        x_scales,
        blocks.slots,
        blocks.experts,
        weights,
        weight,
        scales,
        bias,
        out,
        in_features,
        out_features,
        x.stride(0),
        0 if x_scales is None else x_scales.shape[1],
        0 if scales is None else scales[0].numel(),
        first,
        count,
        TOP_K=top_k,
        BLOCK_M=tile.pairs,
        BLOCK_N=tile.rows,
        BLOCK_K=_LINE // weight.itemsize,
        SIZE=block,
        STAGES=tile.stages,
        LAG=LAG,
        ACTIVATION=activation,
        TILED=tiled,
        OVERLAP=overlap,
        num_warps=tile.warps,
        **launch_options(overlap),
    )
