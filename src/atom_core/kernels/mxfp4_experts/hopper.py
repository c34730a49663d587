"""A block of tokens by some rows of one expert's weight on Hopper, in Gluon, which says where each number is.

A weight goes from global memory to shared memory as :mod:`.packing` keeps it, and from there to registers, where tensor
cores take their left side from (``wgmma``); there it becomes e4m3, so it never lies anywhere with more bits. Tensor
cores sum up the 64 products of a group with an input, which are of two numbers, one behind the other; the group's scale
enters then, in float32.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from atom_core.kernels.experts.grouped import Held, block_rows, combine, sort_by_expert
from atom_core.kernels.gated_activation.triton_kernel import gated
from atom_core.kernels.linear.few_rows_hopper import barrier, depend, load
from atom_core.kernels.linear.triton_kernel import Norm
from atom_core.kernels.mxfp4_experts.packing import FACTOR, split
from atom_core.kernels.triton_support import launch_options

_gated = gluon.jit(gated.fn)
_FACTOR = gl.constexpr(FACTOR)

#: Tokens up to which nothing is sorted.
MAX_TOKENS = 16


@gluon.jit
def _planes(packed):
    """Two tiles of e4m3, of the first and of the second numbers of bytes; see :func:`.packing.pack`."""
    return gl.inline_asm_elementwise(
        "{ .reg .b32 left, right; and.b32 $0, $2, 0x9c9c9c9c; shl.b32 left, $2, 2; shr.u32 right, $2, 2; "
        "lop3.b32 left, left, right, 0x8c8c8c8c, 0xe4; and.b32 $1, left, 0x9c9c9c9c; }",
        "=r,=r,r",
        [packed],
        dtype=(gl.float8e4nv, gl.float8e4nv),
        is_pure=True,
        pack=4,
    )


@gluon.jit
def _halves(tile):
    half: gl.constexpr = tile.shape[1] // 2
    return gl.split(tile.reshape([tile.shape[0], 2, half]).permute([0, 2, 1]))


@gluon.jit
def _spans(tile, SPANS: gl.constexpr):
    """Tiles of 32 columns each."""
    gl.static_assert((SPANS == 2) | (SPANS == 4))
    first, second = _halves(tile)
    if SPANS == 4:
        return _halves(first) + _halves(second)
    else:  # noqa: RET505 - decided when compiling, and what stands behind a return would be compiled all the same
        return first, second


@gluon.jit
def _twice(span, layout: gl.constexpr):
    """For the leading parts of the inputs, and for what they leave."""
    both = gl.join(span, span).permute([0, 2, 1]).reshape([span.shape[0], 64])
    return gl.convert_layout(both, layout)


@gluon.jit
def _scaled(sums, scales, GROUP: gl.constexpr, layout: gl.constexpr):
    """A group's ``sums [BLOCK_N, TOKENS]`` times its scales."""
    each = scales.slice(GROUP, 1, dim=0).permute((1, 0)).load(layout).to(gl.int32)
    return sums * (each << 23).to(gl.float32, bitcast=True)


@gluon.jit
def _pairs(
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
    """The expert of this block, -1 where there is nothing to do, and ``[TOKENS]`` its pairs; -1: none.

    Without ``slots`` the block is a pair's, and is done where that is the first of its expert.
    """
    block = gl.program_id(1)
    of_token: gl.constexpr = gl.SliceLayout(1, layout)
    token = gl.arange(0, TOKENS, of_token)
    # Chosen before the kernel in front began; the first-level cache may still have what was there before.
    if slots is not None:
        expert = gl.load(block_experts + block, cache_modifier=".cg")
        pair = gl.load(slots + block * TOKENS + token, cache_modifier=".cg")
    else:
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
def _rows(lane, N, BLOCK_N: gl.constexpr, GATED: gl.constexpr):
    """The weight's rows in the order of a tile, and whether there are such.

    Of 16 rows the first eight are gates, then come theirs: a thread has both, for it holds every eighth row of sums.
    """
    if GATED:
        out = gl.program_id(0) * (BLOCK_N // 2) + lane // 16 * 8 + lane % 8
        return out + lane // 8 % 2 * (N // 2), out < N // 2
    else:  # noqa: RET505 - decided when compiling, and what stands behind a return would be compiled all the same
        out = gl.program_id(0) * BLOCK_N + lane
        return out, out < N


@gluon.jit
def _copy_weight(tiles, scale_tiles, at, scale_at, wide, wide_scales, step, width, column, group, groups, N, place):
    """A step's columns, where an expert's row is not at its end: there, zero, with scales of the last group."""
    W: gl.constexpr = tiles.shape[2]
    G: gl.constexpr = scale_tiles.shape[1]
    known = wide & (step * W + column < width)[None, :]
    load(tiles.index(place), at + step * W, mask=known, eviction_policy="evict_first")
    here = gl.minimum(step * G + group, groups - 1)[:, None]
    load(scale_tiles.index(place), scale_at + here * N, mask=wide_scales & (here >= 0))


@gluon.jit
def _copy_inputs(inputs, x_at, used, number, of_line, step, input_groups, G: gl.constexpr, place):
    known = used & (step * G + of_line < input_groups)
    load(inputs.index(place), x_at + step * (G * 64), mask=known[:, None] & (number >= 0)[None, :])


@gluon.jit(do_not_specialize=["T"])
def expert_rows_hopper(
    x,
    x_scales,
    experts,
    block_experts,
    slots,
    weights,
    blocks,
    scales,
    bias,
    out,
    T,
    N,
    groups,
    FIRST: gl.constexpr,
    COUNT: gl.constexpr,
    TOP_K: gl.constexpr,
    PLACES: gl.constexpr,
    TOKENS: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
    ACTIVATION: gl.constexpr,
    OVERLAP: gl.constexpr,
):
    """A block of pairs of one expert by ``BLOCK_N`` rows of its weight.

    With an activation rows of ``x`` are tokens, and rows of ``out`` pairs, or where there are ``slots`` those; without,
    the other way round, and results are given their pair's weight. A row of the weight has ``groups``.
    """
    # Triton sees from the product that sixteen columns can be copied together.
    width = groups * 16
    input_groups = (groups + 1) // 2 * 2
    GATED: gl.constexpr = ACTIVATION is not None
    FEW: gl.constexpr = slots is None
    W: gl.constexpr = BLOCK_K // 2
    SPANS: gl.constexpr = W // 32
    G: gl.constexpr = 2 * SPANS
    warps: gl.constexpr = gl.num_warps()
    out_dtype: gl.constexpr = out.dtype.element_ty
    copied: gl.constexpr = gl.BlockedLayout([1, 16], [512 // W, W // 16], [warps, 1], [1, 0])
    lines: gl.constexpr = gl.BlockedLayout([1, 16], [8, 4], [warps, 1], [1, 0])
    vector: gl.constexpr = 8 if GATED else 16
    copied_scales: gl.constexpr = gl.BlockedLayout(
        [1, vector], [max(1, 32 * vector // BLOCK_N), min(32, BLOCK_N // vector)], [warps, 1], [1, 0]
    )
    looked: gl.constexpr = gl.BlockedLayout([1, 1], [32 // PLACES, PLACES], [warps, 1], [1, 0])
    spread: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [warps, 1], [1, 0])
    summed: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, TOKENS, 32])
    left: gl.constexpr = gl.DotOperandLayout(0, summed, 4)
    expert, pair = _pairs(experts, block_experts, slots, T, FIRST, COUNT, TOP_K, PLACES, TOKENS, looked)
    if expert < 0:
        # One waits though it has nothing to do, so that whoever waits for this kernel waits for those in front as well.
        if OVERLAP and gl.program_id(0) + gl.program_id(1) == 0:
            depend("griddepcontrol.wait; // $0")
        return
    expert = expert.to(gl.int64)
    tiles = gl.allocate_shared_memory(
        gl.uint8, [STAGES, BLOCK_N, W], gl.NVMMASharedLayout.get_default_for([BLOCK_N, W], gl.uint8)
    )
    scale_tiles = gl.allocate_shared_memory(gl.uint8, [STAGES, G, BLOCK_N], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    inputs = gl.allocate_shared_memory(
        gl.float8e4nv, [STAGES, G * TOKENS, 64], gl.NVMMASharedLayout.get_default_for([G * TOKENS, 64], gl.float8e4nv)
    )
    column = gl.arange(0, W, gl.SliceLayout(0, copied))
    row, wide = _rows(gl.arange(0, BLOCK_N, gl.SliceLayout(1, copied)), N, BLOCK_N, GATED)
    scale_row, wide_scales = _rows(gl.arange(0, BLOCK_N, gl.SliceLayout(0, copied_scales)), N, BLOCK_N, GATED)
    group = gl.arange(0, G, gl.SliceLayout(1, copied_scales))
    wide, wide_scales = wide[:, None], wide_scales[None, :]
    at = blocks + (expert * N + row)[:, None] * width + column[None, :]
    scale_at = scales + expert * groups * N + scale_row[None, :]
    for stage in gl.static_range(STAGES - 1):
        _copy_weight(tiles, scale_tiles, at, scale_at, wide, wide_scales, stage, width, column, group, groups, N, stage)
        async_copy.commit_group()
    if OVERLAP:
        depend("griddepcontrol.wait; // $0")
        # Not earlier: the kernel behind reads which experts they are without waiting for this one.
        depend("griddepcontrol.launch_dependents; // $0")
    given = gl.convert_layout(pair, gl.SliceLayout(0, spread))
    x_row = given
    if GATED:
        x_row = given // TOP_K
    elif not FEW:
        x_row = gl.program_id(1) * TOKENS + gl.arange(0, TOKENS, gl.SliceLayout(0, spread))
    x_row = gl.where(given >= 0, x_row, -1)
    # A tile of inputs has all tokens of a group, then those of the next.
    line = gl.arange(0, G * TOKENS, gl.SliceLayout(1, lines))
    of_line, number = line // TOKENS, gl.arange(0, 64, gl.SliceLayout(0, lines))
    each_group = x_row[None, :] + gl.arange(0, G, gl.SliceLayout(1, spread))[:, None] * 0
    line_row = gl.convert_layout(each_group.reshape([G * TOKENS]), gl.SliceLayout(1, lines))
    used = line_row >= 0
    x_at = x + (line_row.to(gl.int64) * input_groups + of_line)[:, None] * 64 + number[None, :]
    for stage in gl.static_range(STAGES - 1):
        _copy_inputs(inputs, x_at, used, number, of_line, stage, input_groups, G, stage)
        async_copy.commit_group()
    total = gl.zeros([BLOCK_N, TOKENS], gl.float32, summed)
    nothing = gl.zeros([BLOCK_N, TOKENS], gl.float32, summed)
    steps = gl.cdiv(width, W)
    place = 0
    filled = STAGES - 1
    for step in range(steps):
        async_copy.wait_group(STAGES - 2)
        fence_async_shared()
        barrier()
        ahead = step + (STAGES - 1)
        if ahead < steps:
            _copy_weight(
                tiles, scale_tiles, at, scale_at, wide, wide_scales, ahead, width, column, group, groups, N, filled
            )
            _copy_inputs(inputs, x_at, used, number, of_line, ahead, input_groups, G, filled)
        async_copy.commit_group()
        first, second = _planes(tiles.index(place).load(left))
        planes = (_spans(first, SPANS), _spans(second, SPANS))
        here = inputs.index(place)
        of_groups = scale_tiles.index(place)
        before = nothing
        for each in gl.static_range(G):
            plane = _twice(planes[each % 2][each // 2], left)
            right = here.slice(each * TOKENS, TOKENS, dim=0).permute((1, 0))
            sums = warpgroup_mma(plane, right, nothing, use_acc=False, is_async=True)
            # While tensor cores take this group, the one in front of it is added.
            if each > 0:
                total += _scaled(warpgroup_mma_wait(1, deps=[before]), of_groups, each - 1, summed)
            before = sums
        total += _scaled(warpgroup_mma_wait(0, deps=[before]), of_groups, G - 1, summed)
        place = (place + 1) % STAGES
        filled = (filled + 1) % STAGES
    scaled_row = gl.convert_layout(x_row, gl.SliceLayout(0, summed))
    total *= _FACTOR * gl.load(x_scales + scaled_row, mask=scaled_row >= 0, other=0.0)[None, :]
    of_sum, there = _rows(gl.arange(0, BLOCK_N, gl.SliceLayout(1, summed)), N, BLOCK_N, GATED)
    if bias is not None:
        total += gl.load(bias + expert * N + of_sum, mask=there, other=0.0).to(gl.float32)[:, None]
    features = N
    WIDTH: gl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    if GATED:
        features = N // 2
        gate, up = gl.split(total.reshape([BLOCK_N // 16, 2, 8, TOKENS]).permute([0, 2, 3, 1]))
        # Rounded where a kernel of its own would read them.
        gate = gate.to(out_dtype).to(gl.float32)
        up = up.to(out_dtype).to(gl.float32)
        total = _gated(gate, up, ACTIVATION).reshape([WIDTH, TOKENS])
    stored: gl.constexpr = gl.BlockedLayout([1, 1], [32, 1], [1, warps], [0, 1])
    result = gl.convert_layout(total, stored)
    to = gl.program_id(0) * WIDTH + gl.arange(0, WIDTH, gl.SliceLayout(1, stored))
    given_out = gl.convert_layout(pair, gl.SliceLayout(0, stored))
    out_row = given_out
    if GATED and not FEW:
        out_row = gl.program_id(1) * TOKENS + gl.arange(0, TOKENS, gl.SliceLayout(0, stored))
    if not GATED:
        result *= gl.load(weights + given_out, mask=given_out >= 0, other=0.0)[None, :]
    known = (given_out >= 0)[None, :] & (to < features)[:, None]
    gl.store(out + out_row.to(gl.int64)[None, :] * features + to[:, None], result.to(out_dtype), mask=known)


@dataclass(frozen=True)
class Tile:
    """What one program takes."""

    rows: int
    """Of the weight: 16 a warp at least."""
    columns: int
    """Of the weight, at a time."""
    stages: int
    warps: int


def tile_for(tokens: int, block: int, gated: bool) -> Tile:
    """The tile of blocks of ``block`` tokens."""
    if block <= 16:
        return Tile(64, 256, 4, 4)
    if block <= 32:
        return Tile(64, 256, 3, 4)
    return Tile(128, 128, 3, 8)


def mixture_on_hopper(
    x: torch.Tensor,
    weights: torch.Tensor,
    experts: torch.Tensor,
    to_middle: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None],
    to_answer: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None],
    held: Held,
    activation: int,
    rounded_inputs: bool,
    overlap: bool,
    residual: torch.Tensor | None,
    norm: Norm | None,
) -> torch.Tensor:
    """See :func:`atom_core.kernels.mxfp4_experts.triton_kernel.mixture`, whose arguments these are.

    Up to :data:`MAX_TOKENS` tokens are not sorted: each program finds those that go to its expert.
    """
    (tokens, hidden), pairs, few = x.shape, experts.numel(), len(x) <= MAX_TOKENS
    size = 2 * to_answer[0].shape[2]
    if few:
        block_experts, slots, num_blocks, rows = None, None, pairs, 8 if tokens <= 8 else 16
        middle_rows = pairs
    else:
        sorted_pairs = sort_by_expert(experts, held, block_rows(tokens, held), overlap)
        block_experts, slots, rows = sorted_pairs.experts, sorted_pairs.slots, sorted_pairs.rows
        num_blocks, middle_rows = len(block_experts), len(slots)
    # Last: the product behind it reads which experts they are, and weights, before it waits.
    given, given_scales = split(x, overlap, rounds=rounded_inputs, norm=norm)
    middle = torch.empty(middle_rows, size, dtype=x.dtype, device=x.device)
    answers = torch.empty(pairs, hidden, dtype=torch.float32 if few else x.dtype, device=x.device)
    for shares, (blocks, scales, bias), out, act in (
        (None, to_middle, middle, activation),
        (weights, to_answer, answers, None),
    ):
        if act is None:
            given, given_scales = split(middle, overlap, rounds=rounded_inputs, slots=slots)
        out_features, tile = blocks.shape[1], tile_for(tokens, rows, act is not None)
        expert_rows_hopper[(triton.cdiv(out_features, tile.rows), num_blocks)](
            given,
            given_scales,
            experts if few else None,
            block_experts,
            slots,
            shares,
            blocks,
            scales,
            bias,
            out,
            tokens,
            out_features,
            scales.shape[2],
            FIRST=held.first,
            COUNT=held.count,
            TOP_K=held.top_k,
            PLACES=triton.next_power_of_2(held.top_k),
            TOKENS=rows,
            BLOCK_N=tile.rows,
            BLOCK_K=tile.columns,
            STAGES=tile.stages,
            ACTIVATION=act,
            OVERLAP=overlap,
            num_warps=tile.warps,
            **launch_options(overlap),
        )
    return combine(answers, experts, held, x.dtype, overlap, residual)
