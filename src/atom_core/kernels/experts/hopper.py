"""Blocks of many routed tokens of one expert on Hopper, in Gluon, with tiles that keep the tensor cores busy.

Input rows are gathered to shared memory by ``cp.async``, weight rows likewise. ``wgmma`` reads both from there, and one
``wgmma`` always runs while the next tiles are loaded. With block scales, the sums of one group are scaled while the
next group is multiplied: two accumulators alternate.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    warpgroup_mma,
    warpgroup_mma_wait,
)

from atom_core.kernels.eviction import EVICT_LAST
from atom_core.kernels.experts import blocked_layout
from atom_core.kernels.experts.blocked_layout import BLOCK_SIZE
from atom_core.kernels.gated_activation.triton_kernel import gated
from atom_core.kernels.launch import entry_kernel
from atom_core.kernels.linear.few_rows_hopper import LAG, activated, all_copied, depend, load, ready
from atom_core.kernels.linear.tiles import aligned
from atom_core.kernels.triton_support import cdiv, launch_options

if TYPE_CHECKING:
    from atom_core.kernels.experts.grouped import Blocks

_gated = gluon.jit(gated.fn)
row_at, column_at = gluon.jit(blocked_layout.row_at.fn), gluon.jit(blocked_layout.column_at.fn)

#: Bytes of a row in one copy: the swizzle width of shared memory.
_LINE = 128


@gluon.jit
def sorted_routed_tokens(block_experts, slots, TOKENS: gl.constexpr, layout: gl.constexpr):
    """The expert of this block, -1: none; and its routed tokens ``[TOKENS]`` in a layout, -1: unused slot."""
    block = gl.program_id(1)
    place = gl.arange(0, TOKENS, layout)
    # Sorted before the previous kernel started, but the L1 cache may have older values.
    expert = gl.load(block_experts + block, cache_modifier=".cg")
    routed_token = gl.load(slots + block * TOKENS + place, cache_modifier=".cg")
    return expert, routed_token


@gluon.jit
def tokens_of_block(
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
    """As :func:`sorted_routed_tokens`; without ``slots``, a block is a routed token, if the first of its expert."""
    of_token: gl.constexpr = gl.SliceLayout(1, layout)
    if slots is not None:
        expert, routed_token = sorted_routed_tokens(block_experts, slots, TOKENS, of_token)
    else:
        block = gl.program_id(1)
        token = gl.arange(0, TOKENS, of_token)
        # Also written before the previous kernel started.
        expert = gl.load(experts + block, cache_modifier=".cg")
        place = gl.arange(0, PLACES, gl.SliceLayout(0, layout))
        chosen = (token < T)[:, None] & (place < TOP_K)[None, :]
        at = experts + token[:, None] * TOP_K + place[None, :]
        others = gl.load(at, mask=chosen, other=FIRST - 1, cache_modifier=".cg")
        # A token is routed to an expert at most once.
        mine = gl.max(gl.where(chosen & (others == expert), place[None, :] + 1, 0), 1) - 1
        routed_token = gl.where(mine >= 0, token * TOP_K + mine, -1)
        first = gl.min(gl.where(mine >= 0, routed_token, TOKENS * TOP_K), 0)
        expert -= FIRST
        if (expert >= COUNT) | (first < block):
            expert = expert * 0 - 1
    return expert, routed_token


@gluon.jit
def input_rows(
    row, SORTED: gl.constexpr, GATED: gl.constexpr, TOP_K: gl.constexpr, TOKENS: gl.constexpr, layout: gl.constexpr
):
    """The input row of each of a block's routed tokens: the token, or :func:`store_routed_tokens`' row."""
    if GATED:
        row = row // TOP_K
    elif SORTED:
        row = gl.program_id(1) * TOKENS + gl.arange(0, TOKENS, layout)
    return row


@gluon.jit
def store_routed_tokens(
    total,
    routed_token,
    weights,
    out,
    tile,
    N,
    SORTED: gl.constexpr,
    SPLIT: gl.constexpr,
    BLOCK_N: gl.constexpr,
    TOKENS: gl.constexpr,
    ACTIVATION: gl.constexpr,
):
    """Activate ``total [BLOCK_N, TOKENS]`` or multiply it by the routing weights ``[TOKENS]``, and store it.

    ``tile``: which ``BLOCK_N`` rows of the weight they are of. An activated block that is ``SORTED`` goes to its slots,
    everything else to rows of routed tokens. ``SPLIT``: a row is stored as four planes: elements 0, 4, 8, ... first,
    then 1, 5, 9, ..., and so on.
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
    to = tile * WIDTH + gl.arange(0, WIDTH, gl.SliceLayout(1, stored))
    out_routed_token = gl.convert_layout(routed_token, gl.SliceLayout(0, stored))
    out_row = out_routed_token
    if GATED and SORTED:
        out_row = gl.program_id(1) * TOKENS + gl.arange(0, TOKENS, gl.SliceLayout(0, stored))
    if not GATED:
        result *= gl.load(weights + out_routed_token, mask=out_routed_token >= 0, other=0.0)[None, :]
    known = (out_routed_token >= 0)[None, :] & (to < width)[:, None]
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
    """The weight rows of a tile: gate rows, then as many up rows; indices past the last row repeat it."""
    if GATED:
        half = N // 2
        row = gl.program_id(0) * (BLOCK_N // 2) + lane % (BLOCK_N // 2)
        row = gl.minimum(row, half - 1) + lane // (BLOCK_N // 2) * half
    else:
        row = gl.minimum(gl.program_id(0) * BLOCK_N + lane, N - 1)
    return row


@gluon.jit
def _next_tile(inputs, tiles, x_at, weight, at, used, step, steps, place, BLOCK_K: gl.constexpr, apart: gl.constexpr):
    """Start to copy the tiles of a step. A mask skips missing steps: a branch would wait for ``wgmma``."""
    there = step < steps
    load(inputs.index(place), x_at + step * BLOCK_K, mask=used & there)
    load(tiles.index(place), weight + step * apart + at, mask=there)
    async_copy.commit_group()


@gluon.jit
def _begin(inputs, tiles, zeros, place):
    """Start the product of the tiles at a place."""
    return warpgroup_mma(inputs.index(place), tiles.index(place).permute((1, 0)), zeros, use_acc=False, is_async=True)


@gluon.jit
def _factors(x_scales, used, first, second, step, stride_x_scales, steps):
    """The scales of a group's sums, ``[BLOCK_M]``: for the first rows, or gate, and for up."""
    here = gl.minimum(step, steps - 1)
    theirs = gl.load(x_scales + here * stride_x_scales, mask=used, other=0.0)
    return theirs * gl.load(first + here), theirs * gl.load(second + here)


@gluon.jit
def _scaled(sums, of_first, of_second, column, BLOCK_N: gl.constexpr, GATED: gl.constexpr):
    if GATED:
        return sums * gl.where((column < BLOCK_N // 2)[None, :], of_first[:, None], of_second[:, None])
    else:  # noqa: RET505 - a compile-time branch: code after a return would be compiled in either case
        return sums * of_first[:, None]


@entry_kernel
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
    BLOCKED: gl.constexpr,
    OVERLAP: gl.constexpr,
):
    """``BLOCK_M`` routed tokens by ``BLOCK_N`` rows of their expert's weight; see :func:`multiply_on_hopper`.

    With an activation, rows of ``x`` are tokens and the result goes to the block's slots. Without, rows of ``x`` are
    slots, and the result, times the routing weight, goes to the routed token.
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
    routed_token = gl.load(slots + slot)
    used = (routed_token >= 0)[:, None]
    x_row = slot
    if GATED:
        x_row = routed_token // TOP_K
    x_at = x + x_row.to(gl.int64)[:, None] * stride_x + column[None, :]
    row = _weight_rows(gl.arange(0, BLOCK_N, gl.SliceLayout(1, copied)), N, BLOCK_N, GATED)
    weight += expert * N * K
    at = row_at(row, K, BLOCKED)[:, None] + column[None, :]
    # The blocked layout is for 16 bits, where its blocks are as wide as these tiles.
    apart: gl.constexpr = BLOCK_K * BLOCK_SIZE if BLOCKED else BLOCK_K
    steps = K // BLOCK_K
    for stage in gl.static_range(ahead):
        _next_tile(inputs, tiles, x_at, weight, at, used, stage, steps, stage, BLOCK_K, apart)

    # The same in the layout of the sums.
    sum_slot = block * BLOCK_M + gl.arange(0, BLOCK_M, of_rows)
    sum_routed_token = gl.load(slots + sum_slot)
    sum_used = sum_routed_token >= 0
    sum_x = sum_slot
    if GATED:
        sum_x = sum_routed_token // TOP_K
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
        # All rows of a tile, or of its gate or up half, have the same scale.
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
        # Rounded as if the activation were a kernel of its own.
        gate = gate.to(out_dtype).to(gl.float32)
        up = up.to(out_dtype).to(gl.float32)
        total = _gated(gate, up, ACTIVATION)
    else:
        total *= gl.load(weights + sum_routed_token, mask=sum_used, other=0.0)[:, None]
    stored: gl.constexpr = gl.BlockedLayout([1, 8], [32 * 8 // WIDTH, WIDTH // 8], [warps, 1], [1, 0])
    result = gl.convert_layout(total.to(out_dtype), stored)
    out_slot = block * BLOCK_M + gl.arange(0, BLOCK_M, gl.SliceLayout(1, stored))
    out_routed_token = gl.load(slots + out_slot)
    out_row = out_routed_token
    if GATED:
        out_row = out_slot
    to = gl.program_id(0) * WIDTH + gl.arange(0, WIDTH, gl.SliceLayout(0, stored))
    known = (out_routed_token >= 0)[:, None] & (to < width)[None, :]
    gl.store(out + out_row.to(gl.int64)[:, None] * width + to[None, :], result, mask=known, eviction_policy=EVICT_LAST)


@dataclass(frozen=True)
class Tile:
    """The tile of one program; on an H200 the best of some eight for Qwen3 30B-A3B."""

    routed_tokens: int
    """Routed tokens of a block."""
    rows: int
    """Rows of the weight."""
    stages: int
    """Tiles that shared memory has room for."""
    warps: int


#: With block scales, two programs share a multiprocessor, so that one multiplies while the other scales.
_SCALED, _PLAIN = Tile(64, 128, 4, 4), Tile(128, 256, 4, 8)


def takes(x: torch.Tensor, weight: torch.Tensor, blocks: Blocks, block: int, gated: bool) -> bool:
    """Whether :func:`multiply_on_hopper` supports this product on Hopper."""
    return (
        blocks.rows == (_SCALED if block else _PLAIN).routed_tokens
        and weight.itemsize <= 2
        and weight.shape[2] * weight.itemsize % _LINE == 0
        and aligned(x)
        and weight.data_ptr() % 16 == 0
        and weight[0].numel() < 2**31
        # Half of a tile is gate rows, which have their own scales.
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
    blocked: bool = False,
) -> None:
    """One product of experts, into ``out``.

    Args:
        x: ``[T, K]`` with an activation, else ``[blocks x rows, K]``; 16 bits or a variant of e4m3.
        x_scales: float32 ``[groups, rows of x]``, for FP8.
        blocks: the routed tokens sorted by expert.
        weights: float32 ``[T, k]`` without an activation.
        weight: ``[E, N, K]`` in the dtype of ``x``, of the experts from ``first`` on; blocks of others are skipped.
        scales: see :mod:`atom_core.kernels.fp8_experts`.
        bias: ``[E, N]``.
        out: ``[blocks x rows, N / 2]`` with an activation, else ``[T k, N]``; unused rows are not written.
        top_k: experts per token.
        block: size of the square blocks that share a scale; 0: one scale per row.
        activation: a value of ``ACTIVATIONS``, or None.
        overlap: see :func:`atom_core.kernels.triton_support.overlaps`.
        first: index of the first expert of ``weight`` among those of ``blocks``.
        blocked: whether the 16-bit weight is in the blocked layout of :mod:`.blocked_layout`.
    """
    count, out_features, in_features = weight.shape
    tile = _SCALED if block else _PLAIN
    grouped_rows_hopper[(cdiv(out_features, tile.rows), len(blocks.experts))](
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
        BLOCK_M=tile.routed_tokens,
        BLOCK_N=tile.rows,
        BLOCK_K=_LINE // weight.itemsize,
        SIZE=block,
        STAGES=tile.stages,
        LAG=LAG,
        ACTIVATION=activation,
        BLOCKED=blocked,
        OVERLAP=overlap,
        num_warps=tile.warps,
        **launch_options(overlap),
    )
