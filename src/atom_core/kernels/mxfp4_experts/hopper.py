"""Blocks of routed tokens of one expert in MXFP4 on Hopper, in Gluon, which controls where each value is.

A weight is copied from global to shared memory as it is stored, loaded to the registers of the left operand of the
tensor cores, and converted to bfloat16 there, so its 16-bit form is never in memory. Four adjacent values, two bytes,
are one element of an int16 tile. The first values of all elements form one left operand, the second values another, and
so on. The input has the same order (:func:`atom_core.kernels.mxfp4_linear.inputs.prepare`), so threads exchange
nothing. When weights are loaded, :func:`atom_core.kernels.mxfp4_experts.bits.spread` reorders the bits within the two
bytes, so that the conversion takes the fewest instructions.

e2m1's bits in bfloat16's fields are the value times 2 ** -126, including the subnormal. The kernel multiplies two
values at a time by their scale times 2 ** 62, and the sums by 2 ** 64 at the end. So scales above 2 ** 65 are not
supported, and values below 2 ** -62 may become zero.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from atom_core.kernels.experts.grouped import (
    HEADROOM,
    LocalExperts,
    block_rows,
    combine,
    combine_key,
    grouped_keys,
    sort_by_expert,
)
from atom_core.kernels.experts.hopper import input_rows, store_routed_tokens, tokens_of_block
from atom_core.kernels.launch import entry_kernel
from atom_core.kernels.linear.few_rows_hopper import barrier, depend, load
from atom_core.kernels.linear.triton_kernel import Norm
from atom_core.kernels.mxfp4_linear.inputs import prepare
from atom_core.kernels.triton_support import cdiv, launch_options, next_power_of_2

#: Instructions that move each of an element's values to bfloat16's sign and other bits, for two elements at a time.
_BOTH = "and.b32 number, number, 0x01c001c0; lop3.b32 number, number, sign, 0x80008000, 0xf8; "
_FIRST = gl.constexpr("and.b32 number, $1, 0x81c081c0; ")
_SECOND = gl.constexpr("shl.b32 number, $1, 3; and.b32 number, number, 0x81c081c0; ")
_THIRD = gl.constexpr("shl.b32 number, $1, 6; shl.b32 sign, $1, 2; " + _BOTH)
_FOURTH = gl.constexpr("shr.u32 number, $1, 3; shl.b32 sign, $1, 1; " + _BOTH)

#: Largest number of tokens that are not sorted.
MAX_TOKENS = 16


@gluon.jit
def _plane(packed, each, NUMBER: gl.constexpr):
    """One of the four values of each element, in bfloat16: times 2 ** (each - 127 - 64)."""
    return gl.inline_asm_elementwise(
        "{ .reg .b32 scale, number, sign; mad.lo.u32 scale, $2, 0x00800080, 0x1f001f00; "
        + NUMBER
        + "mul.rn.bf16x2 $0, number, scale; }",
        "=r,r,r,r",
        [packed, each],
        dtype=gl.bfloat16,
        is_pure=True,
        pack=2,
    )


@gluon.jit
def _rows(lane, N, BLOCK_N: gl.constexpr, GATED: gl.constexpr):
    """The weight rows of a tile, and whether they exist.

    The first eight of 16 rows are gate, the others up: a thread has every eighth row of the sums, and so both.
    """
    if GATED:
        out = gl.program_id(0) * (BLOCK_N // 2) + lane // 16 * 8 + lane % 8
        return out + lane // 8 % 2 * (N // 2), out < N // 2
    else:  # noqa: RET505 - a compile-time branch: code after a return would be compiled in either case
        out = gl.program_id(0) * BLOCK_N + lane
        return out, out < N


@gluon.jit
def _copy_weight(tiles, scale_tiles, at, scale_at, wide, wide_scales, begin, quarter, column, group, N, place):
    """Start to copy columns from ``begin`` on; those past the end of a row are zeros."""
    known = wide & (begin + column < quarter)[None, :]
    load(tiles.index(place), at + begin, mask=known, eviction_policy="evict_first")
    known = wide_scales & (begin + group * 8 < quarter)[:, None]
    load(scale_tiles.index(place), scale_at + (begin // 8) * N, mask=known)


@gluon.jit
def _copy_inputs(inputs, x_at, used, begin, quarter, column, place):
    load(inputs.index(place), x_at + begin, mask=used & (begin + column < quarter)[None, :])


@gluon.jit
def _scales(tile, GROUP: gl.constexpr, layout: gl.constexpr):
    """``[BLOCK_N, 1]``: the scales of a group of 32 columns."""
    return tile.slice(GROUP, 1, dim=0).permute((1, 0)).load(layout).to(gl.int32)


@gluon.jit
def _add_product(
    left, inputs, total, PLANE: gl.constexpr, TOKENS: gl.constexpr, TOGETHER: gl.constexpr, right: gl.constexpr
):
    """Add ``left`` times a quarter of the input columns, ``[W, TOKENS]``; ``wgmma`` only starts here."""
    plane = inputs.slice(PLANE * TOKENS, TOKENS, dim=0).permute((1, 0))
    return warpgroup_mma(left, plane, total, is_async=True) if TOGETHER else mma_v2(left, plane.load(right), total)


@entry_kernel
@gluon.jit(do_not_specialize=["T"])
def expert_rows_hopper(
    x,
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
    TOGETHER: gl.constexpr,
    STAGES: gl.constexpr,
    ACTIVATION: gl.constexpr,
    SPLIT: gl.constexpr,
    OVERLAP: gl.constexpr,
):
    """A block of routed tokens of one expert by ``BLOCK_N`` rows of its weight.

    With an activation, rows of ``x`` are tokens and rows of ``out`` are slots, or routed tokens without ``slots``.
    Without, ``x`` has those rows, rows of ``out`` are routed tokens, and results are multiplied by the routing weight.
    ``groups``: of a weight row; ``SPLIT``: the result has the order of the next product's input; ``TOGETHER``: four
    warps multiply together (``wgmma``) and read the input from shared memory once.
    """
    # From this product Triton knows that eight columns can be copied together.
    quarter = groups * 8
    GATED: gl.constexpr = ACTIVATION is not None
    FEW: gl.constexpr = slots is None
    W: gl.constexpr = BLOCK_K // 4
    GROUPS: gl.constexpr = W // 8
    warps: gl.constexpr = gl.num_warps()
    across: gl.constexpr = W // 8
    copied: gl.constexpr = gl.BlockedLayout([1, 8], [32 // across, across], [warps, 1], [1, 0])
    vector: gl.constexpr = 8 if GATED else 16
    copied_scales: gl.constexpr = gl.BlockedLayout(
        [1, vector], [max(1, 32 * vector // BLOCK_N), min(32, BLOCK_N // vector)], [warps, 1], [1, 0]
    )
    looked: gl.constexpr = gl.BlockedLayout([1, 1], [32 // PLACES, PLACES], [warps, 1], [1, 0])
    planes: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [warps, 1], [1, 0])
    version: gl.constexpr = 3 if TOGETHER else 2
    instruction: gl.constexpr = [16, TOKENS, 16] if TOGETHER else [16, 8]
    summed: gl.constexpr = gl.NVMMADistributedLayout([version, 0], [warps, 1], instruction)
    left: gl.constexpr = gl.DotOperandLayout(0, summed, 2)
    right: gl.constexpr = gl.DotOperandLayout(1, summed, 2)
    expert, routed_token = tokens_of_block(
        experts, block_experts, slots, T, FIRST, COUNT, TOP_K, PLACES, TOKENS, looked
    )
    if expert < 0:
        # One program waits anyway, so that kernels that wait for this one also wait for those before it.
        if OVERLAP and gl.program_id(0) + gl.program_id(1) == 0:
            depend("griddepcontrol.wait; // $0")
        return
    expert = expert.to(gl.int64)
    tiles = gl.allocate_shared_memory(
        gl.int16, [STAGES, BLOCK_N, W], gl.NVMMASharedLayout.get_default_for([BLOCK_N, W], gl.int16)
    )
    scale_tiles = gl.allocate_shared_memory(
        gl.uint8, [STAGES, GROUPS, BLOCK_N], gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    )
    inputs = gl.allocate_shared_memory(
        gl.bfloat16, [STAGES, 4 * TOKENS, W], gl.NVMMASharedLayout.get_default_for([4 * TOKENS, W], gl.bfloat16)
    )
    column = gl.arange(0, W, gl.SliceLayout(0, copied))
    row, wide = _rows(gl.arange(0, BLOCK_N, gl.SliceLayout(1, copied)), N, BLOCK_N, GATED)
    scale_row, wide_scales = _rows(gl.arange(0, BLOCK_N, gl.SliceLayout(0, copied_scales)), N, BLOCK_N, GATED)
    group = gl.arange(0, GROUPS, gl.SliceLayout(1, copied_scales))
    wide, wide_scales = wide[:, None], wide_scales[None, :]
    at = blocks + (expert * N + row)[:, None] * quarter + column[None, :]
    scale_at = scales + (expert * groups + group)[:, None] * N + scale_row[None, :]
    for stage in gl.static_range(STAGES - 1):
        begin = stage * W
        _copy_weight(tiles, scale_tiles, at, scale_at, wide, wide_scales, begin, quarter, column, group, N, stage)
        async_copy.commit_group()
    if OVERLAP:
        depend("griddepcontrol.wait; // $0")
        # Not earlier: the next kernel reads the experts without waiting for this one.
        depend("griddepcontrol.launch_dependents; // $0")
    # The four planes of each row, one after the other.
    plane = gl.arange(0, 4, gl.SliceLayout(1, planes))
    given = gl.convert_layout(routed_token, gl.SliceLayout(0, planes))
    x_row = input_rows(given, not FEW, GATED, TOP_K, TOKENS, gl.SliceLayout(0, planes))
    x_begin = x_row.to(gl.int64)[None, :] * (4 * groups) + plane[:, None] * groups
    x_begin = gl.convert_layout(x_begin.reshape([4 * TOKENS]), gl.SliceLayout(1, copied)) * 8
    used = (given[None, :] + plane[:, None] * 0).reshape([4 * TOKENS])
    used = (gl.convert_layout(used, gl.SliceLayout(1, copied)) >= 0)[:, None]
    x_at = x + x_begin[:, None] + column[None, :]
    for stage in gl.static_range(STAGES - 1):
        _copy_inputs(inputs, x_at, used, stage * W, quarter, column, stage)
        async_copy.commit_group()
    total = gl.zeros([BLOCK_N, TOKENS], gl.float32, summed)
    steps = gl.cdiv(quarter, W)
    element = gl.arange(0, W, gl.SliceLayout(0, left))[None, :]
    place = 0
    filled = STAGES - 1
    for step in range(steps):
        async_copy.wait_group(STAGES - 2)
        if TOGETHER:
            fence_async_shared()
        barrier()
        begin = (step + (STAGES - 1)) * W
        if not TOGETHER:
            if begin < quarter:
                _copy_weight(
                    tiles, scale_tiles, at, scale_at, wide, wide_scales, begin, quarter, column, group, N, filled
                )
                _copy_inputs(inputs, x_at, used, begin, quarter, column, filled)
            async_copy.commit_group()
        packed = tiles.index(place).load(left)
        of_groups = scale_tiles.index(place)
        each = gl.where(element < 8, _scales(of_groups, 0, left), _scales(of_groups, 1, left))
        for number in gl.static_range(2, GROUPS):
            each = gl.where(element < number * 8, each, _scales(of_groups, number, left))
        here = inputs.index(place)
        first = _plane(packed, each, _FIRST)
        total = _add_product(first, here, total, 0, TOKENS, TOGETHER, right)
        second = _plane(packed, each, _SECOND)
        total = _add_product(second, here, total, 1, TOKENS, TOGETHER, right)
        third = _plane(packed, each, _THIRD)
        total = _add_product(third, here, total, 2, TOKENS, TOGETHER, right)
        fourth = _plane(packed, each, _FOURTH)
        total = _add_product(fourth, here, total, 3, TOKENS, TOGETHER, right)
        if TOGETHER:
            # With masks: a branch would wait for each product.
            _copy_weight(tiles, scale_tiles, at, scale_at, wide, wide_scales, begin, quarter, column, group, N, filled)
            _copy_inputs(inputs, x_at, used, begin, quarter, column, filled)
            async_copy.commit_group()
            total = warpgroup_mma_wait(0, [total, first, second, third, fourth])[0]
        place = (place + 1) % STAGES
        filled = (filled + 1) % STAGES
    total *= 18446744073709551616.0
    of_sum, there = _rows(gl.arange(0, BLOCK_N, gl.SliceLayout(1, summed)), N, BLOCK_N, GATED)
    if bias is not None:
        total += gl.load(bias + expert * N + of_sum, mask=there, other=0.0).to(gl.float32)[:, None]
    store_routed_tokens(
        total, routed_token, weights, out, gl.program_id(0), N, not FEW, SPLIT, BLOCK_N, TOKENS, ACTIVATION
    )


@dataclass(frozen=True)
class Tile:
    """The tile of one program."""

    rows: int
    """Rows of the weight."""
    columns: int
    """Columns of the weight per step."""
    stages: int
    warps: int
    together: bool = False
    """Whether four warps multiply together, which pays off for 32 tokens or more."""


def tile_for(tokens: int, block: int, gated: bool) -> Tile:
    """The tile for blocks of ``block`` tokens; on an H200 the best of some eight for GPT-OSS 20B."""
    if tokens == 1:
        return Tile(32, 128, 6, 2) if gated else Tile(16, 128, 8, 1)
    if block <= 8:
        return Tile(64, 256, 3, 4)
    if block <= 16:
        return Tile(128, 128, 3, 4)
    if block <= 32:
        return Tile(128, 128, 3, 4, together=True)
    return Tile(128 if block <= 64 else 256, 128, 3, 8, together=True)


#: Largest average of routed tokens per expert for which a block has at most 64 rows.
_SMALL_BLOCKS = 255


def _rows_of_blocks(tokens: int, local_experts: LocalExperts) -> int:
    """Rows of a block: a second block converts the weight again, but larger blocks have more empty slots."""
    rows = block_rows(tokens, local_experts, HEADROOM)
    return rows if tokens * local_experts.top_k > _SMALL_BLOCKS * local_experts.count else min(rows, 64)


def _rows_of_few(tokens: int) -> int:
    """Rows of a block of up to :data:`MAX_TOKENS` tokens."""
    return 8 if tokens <= 8 else 16


def keys_on_hopper(tokens: int, local_experts: LocalExperts) -> Iterator[Hashable]:
    """What :func:`mixture_on_hopper` is compiled for; see :mod:`atom_core.kernels.compile_keys`."""
    few = tokens <= MAX_TOKENS
    rows = _rows_of_few(tokens) if few else _rows_of_blocks(tokens, local_experts)
    yield few, rows, *(tile_for(tokens, rows, gated) for gated in (True, False))
    if few:
        yield combine_key(tokens)
    else:
        yield from grouped_keys(tokens, local_experts, rows)


def mixture_on_hopper(
    x: torch.Tensor,
    weights: torch.Tensor,
    experts: torch.Tensor,
    gate_up: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None],
    down: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None],
    local_experts: LocalExperts,
    activation: int,
    rounded_inputs: bool,
    overlap: bool,
    residual: torch.Tensor | None,
    norm: Norm | None,
) -> torch.Tensor:
    """See :func:`atom_core.kernels.mxfp4_experts.triton_kernel.mixture`, which has the same arguments.

    Up to :data:`MAX_TOKENS` tokens are not sorted: each program finds the tokens of its expert.
    """
    (tokens, hidden), num_routed_tokens, few = x.shape, experts.numel(), len(x) <= MAX_TOKENS
    size = 2 * down[0].shape[2]
    if few:
        block_experts, slots, num_blocks, rows = None, None, num_routed_tokens, _rows_of_few(tokens)
        intermediate_rows = num_routed_tokens
    else:
        sorted_tokens = sort_by_expert(experts, local_experts, _rows_of_blocks(tokens, local_experts), overlap)
        block_experts, slots, rows = sorted_tokens.experts, sorted_tokens.slots, sorted_tokens.rows
        num_blocks, intermediate_rows = len(block_experts), len(slots)
    # Late and last: the next product reads experts and routing weights before it waits.
    x = prepare(x, overlap, rounds=rounded_inputs, planes=4, norm=norm, late=True)
    intermediate = torch.empty(intermediate_rows, size, dtype=x.dtype, device=x.device)
    outputs = torch.empty(num_routed_tokens, hidden, dtype=torch.float32 if few else x.dtype, device=x.device)
    for given, shares, (blocks, scales, bias), out, act in (
        (x, None, gate_up, intermediate, activation),
        (intermediate, weights, down, outputs, None),
    ):
        if act is None and rounded_inputs:
            given = prepare(given, overlap, rounds=True, planes=4, slots=slots, late=True)
        out_features, tile = blocks.shape[1], tile_for(tokens, rows, act is not None)
        expert_rows_hopper[(cdiv(out_features, tile.rows), num_blocks)](
            given,
            experts if few else None,
            block_experts,
            slots,
            shares,
            blocks.view(torch.int16),
            scales,
            bias,
            out,
            tokens,
            out_features,
            scales.shape[2],
            FIRST=local_experts.first,
            COUNT=local_experts.count,
            TOP_K=local_experts.top_k,
            PLACES=next_power_of_2(local_experts.top_k),
            TOKENS=rows,
            BLOCK_N=tile.rows,
            BLOCK_K=tile.columns,
            TOGETHER=tile.together,
            STAGES=tile.stages,
            ACTIVATION=act,
            SPLIT=act is not None and not rounded_inputs,
            OVERLAP=overlap,
            num_warps=tile.warps,
            **launch_options(overlap),
        )
    return combine(outputs, experts, local_experts, x.dtype, overlap, residual)
