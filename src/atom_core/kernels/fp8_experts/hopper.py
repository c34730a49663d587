"""A block of few pairs of one expert by some rows of its weight in FP8 on Hopper, in Gluon.

The pairs are the right side of a matrix product, whose left side wants many rows: so tensor cores take FP8 as it is,
where few rows on the left would have it widened first. Tiles of the weight are on their way before the input is there,
and scales come with their tiles, as in :mod:`atom_core.kernels.fp8_block_linear.few_rows_hopper`. With scales of blocks
gate and up leave what they make in FP8 as well: no launch quantises it for down.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from atom_core.kernels.eviction import EVICT_LAST
from atom_core.kernels.experts.few_pairs_hopper import Tile
from atom_core.kernels.experts.few_tokens import MAX_TOKENS
from atom_core.kernels.experts.grouped import Blocks, Held
from atom_core.kernels.experts.hopper import input_rows, pairs_of_block, store_pairs
from atom_core.kernels.fp8_block_linear.few_rows_hopper import scale_places
from atom_core.kernels.fp8_inputs import InputForm, QuantizedInput, room
from atom_core.kernels.fp8_linear.quantize import narrowed
from atom_core.kernels.fp8_linear.reference import LIMIT, SMALLEST
from atom_core.kernels.linear.few_rows_hopper import all_copied, barrier, depend, load, ready, weight_rows
from atom_core.kernels.triton_support import launch_options

_narrowed = gluon.jit(narrowed.fn)

#: Columns of a tile: bytes that shared memory interleaves together, and those of a block that has one scale.
COLUMNS = 128


@gluon.jit
def _ask_weight(tiles, of_tiles, at, mine_at, step, steps, place, COLUMNS: gl.constexpr, SIZE: gl.constexpr):
    """Ask for the weight's tile of a step, where there is such, and in blocks for its scales."""
    load(tiles.index(place), at + step * COLUMNS, mask=step < steps, eviction_policy="evict_first")
    if SIZE > 0:
        load(of_tiles.index(place), mine_at + step, mask=step < steps)


@gluon.jit
def _ask_input(
    inputs,
    of_inputs,
    x_at,
    theirs_at,
    stride,
    used,
    known,
    step,
    steps,
    place,
    COLUMNS: gl.constexpr,
    SIZE: gl.constexpr,
):
    """The same of the input's."""
    load(inputs.index(place), x_at + step * COLUMNS, mask=used & (step < steps))
    if SIZE > 0:
        load(of_inputs.index(place), theirs_at + step * stride, mask=known & (step < steps))


@gluon.jit
def _quantize_whole_group(
    out,
    pair,
    quantized,
    out_scales,
    arrivals,
    N,
    stride_out_scales,
    SORTED: gl.constexpr,
    TOKENS: gl.constexpr,
    WIDTH: gl.constexpr,
    GROUP: gl.constexpr,
    LIMIT: gl.constexpr,
    SMALLEST: gl.constexpr,
):
    """Quantise a group of a block's activated columns, if all of them are stored now that this program's are.

    ``arrivals`` count the programs that have stored their ``WIDTH`` columns, of each block and group.
    """
    warps: gl.constexpr = gl.num_warps()
    sharing: gl.constexpr = GROUP // WIDTH
    group = gl.program_id(0) // sharing
    barrier()  # all of this program's stores before its arrival is seen
    arrival = arrivals + gl.program_id(1) * (N // 2 // GROUP) + group
    if gl.atomic_add(arrival, 1, sem="acq_rel", scope="gpu") == sharing - 1:
        read: gl.constexpr = gl.BlockedLayout([4, 1], [32, 1], [1, warps], [0, 1])
        row = gl.convert_layout(pair, gl.SliceLayout(0, read))
        known = row >= 0
        if SORTED:
            row = gl.program_id(1) * TOKENS + gl.arange(0, TOKENS, gl.SliceLayout(0, read))
        column = group * GROUP + gl.arange(0, GROUP, gl.SliceLayout(1, read))
        at = row.to(gl.int64)[None, :] * (N // 2) + column[:, None]
        # Others have stored it since this kernel began.
        numbers = gl.load(out + at, mask=known[None, :], other=0.0, cache_modifier=".cg").to(gl.float32)
        scale = gl.maximum(gl.max(gl.abs(numbers), 0), SMALLEST) / LIMIT
        gl.store(out_scales + group * stride_out_scales + row, scale, mask=known, eviction_policy=EVICT_LAST)
        stored = _narrowed(numbers, (1.0 / scale)[None, :], LIMIT, 1.0, quantized.dtype.element_ty)
        gl.store(quantized + at, stored, mask=known[None, :], eviction_policy=EVICT_LAST)


@gluon.jit(do_not_specialize=["T", "stride_x_scales", "stride_out_scales"])
def expert_rows_fp8_hopper(
    x,
    x_scales,
    experts,
    block_experts,
    slots,
    weights,
    weight,
    scales,
    out,
    quantized,
    out_scales,
    arrivals,
    T,
    K,
    N,
    stride_x_scales,
    stride_scales,
    stride_out_scales,
    FIRST: gl.constexpr,
    COUNT: gl.constexpr,
    TOP_K: gl.constexpr,
    PLACES: gl.constexpr,
    TOKENS: gl.constexpr,
    BLOCK_N: gl.constexpr,
    COLUMNS: gl.constexpr,
    SIZE: gl.constexpr,
    STAGES: gl.constexpr,
    ACTIVATION: gl.constexpr,
    LIMIT: gl.constexpr,
    SMALLEST: gl.constexpr,
    OVERLAP: gl.constexpr,
):
    """A block of pairs of one expert by ``BLOCK_N`` rows of its weight; see :func:`multiply_few_pairs`.

    With an activation rows of ``x`` are tokens, and rows of ``out`` pairs, or where there are ``slots`` those; without,
    the other way round, and results are given their pair's weight.
    """
    GATED: gl.constexpr = ACTIVATION is not None
    FEW: gl.constexpr = slots is None
    dtype: gl.constexpr = weight.dtype.element_ty
    warps: gl.constexpr = gl.num_warps()
    copied: gl.constexpr = gl.BlockedLayout([1, 16], [32 * 16 // COLUMNS, COLUMNS // 16], [warps, 1], [1, 0])
    looked: gl.constexpr = gl.BlockedLayout([1, 1], [32 // PLACES, PLACES], [warps, 1], [1, 0])
    summed: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, TOKENS, 32])
    of_rows: gl.constexpr = gl.SliceLayout(1, summed)
    of_sums: gl.constexpr = gl.SliceLayout(0, summed)
    ahead: gl.constexpr = STAGES - 1
    expert, pair = pairs_of_block(experts, block_experts, slots, T, FIRST, COUNT, TOP_K, PLACES, TOKENS, looked)
    if expert < 0:
        # One waits though it has nothing to do, so that whoever waits for this kernel waits for those in front as well.
        if OVERLAP and gl.program_id(0) + gl.program_id(1) == 0:
            depend("griddepcontrol.wait; // $0")
        return
    expert = expert.to(gl.int64)
    tiles = gl.allocate_shared_memory(
        dtype, [STAGES, BLOCK_N, COLUMNS], gl.NVMMASharedLayout.get_default_for([BLOCK_N, COLUMNS], dtype)
    )
    inputs = gl.allocate_shared_memory(
        dtype, [STAGES, TOKENS, COLUMNS], gl.NVMMASharedLayout.get_default_for([TOKENS, COLUMNS], dtype)
    )
    column = gl.arange(0, COLUMNS, gl.SliceLayout(0, copied))
    row = weight_rows(gl.arange(0, BLOCK_N, gl.SliceLayout(1, copied)), N, BLOCK_N, GATED)
    at = weight + (expert * N + row)[:, None] * K + column[None, :]
    steps = K // COLUMNS
    line: gl.constexpr = gl.BlockedLayout([1], [32], [warps], [0])
    of_tiles, of_inputs = scale_places(STAGES, BLOCK_N, TOKENS)
    scales += expert * stride_scales
    scale_row = weight_rows(gl.arange(0, BLOCK_N, line), N, BLOCK_N, GATED)
    mine_at = scales + scale_row
    if SIZE > 0:
        gl.static_assert(SIZE == COLUMNS)
        mine_at = scales + scale_row // SIZE * steps
    for stage in gl.static_range(ahead):
        _ask_weight(tiles, of_tiles, at, mine_at, stage, steps, stage, COLUMNS, SIZE)
        async_copy.commit_group()
    if OVERLAP:
        depend("griddepcontrol.wait; // $0")
        # Not earlier: the kernel behind reads which experts they are without waiting for this one.
        depend("griddepcontrol.launch_dependents; // $0")
    x_pair = gl.convert_layout(pair, gl.SliceLayout(1, copied))
    scale_pair = gl.convert_layout(pair, line)
    x_row = input_rows(x_pair, not FEW, GATED, TOP_K, TOKENS, gl.SliceLayout(1, copied))
    scale_of = input_rows(scale_pair, not FEW, GATED, TOP_K, TOKENS, line)
    used = (x_pair >= 0)[:, None]
    known = scale_pair >= 0
    x_at = x + x_row.to(gl.int64)[:, None] * K + column[None, :]
    theirs_at = x_scales + scale_of
    for stage in gl.static_range(ahead):
        _ask_input(inputs, of_inputs, x_at, theirs_at, stride_x_scales, used, known, stage, steps, stage, COLUMNS, SIZE)
        async_copy.commit_group()
    zeros = gl.zeros([BLOCK_N, TOKENS], gl.float32, summed)
    total = zeros
    place = 0
    filled = ahead
    for step in range(steps):
        ready(ahead - 1)
        right = inputs.index(place).permute((1, 0))
        if SIZE > 0:
            total_or_part = warpgroup_mma(tiles.index(place), right, zeros, use_acc=False, is_async=True)
        else:
            total_or_part = warpgroup_mma(tiles.index(place), right, total, is_async=True)
        # All are done with the tile of the step before.
        later = step + ahead
        _ask_weight(tiles, of_tiles, at, mine_at, later, steps, filled, COLUMNS, SIZE)
        _ask_input(
            inputs, of_inputs, x_at, theirs_at, stride_x_scales, used, known, later, steps, filled, COLUMNS, SIZE
        )
        async_copy.commit_group()
        if SIZE > 0:
            mine = of_tiles.index(place).load(of_rows)
            theirs = of_inputs.index(place).load(of_sums)
            part = warpgroup_mma_wait(0, [total_or_part])
            total += part * mine[:, None] * theirs[None, :]
        else:
            total = warpgroup_mma_wait(0, [total_or_part])
        place = (place + 1) % STAGES
        filled = (filled + 1) % STAGES
    all_copied()
    if SIZE == 0:
        of_sum = weight_rows(gl.arange(0, BLOCK_N, of_rows), N, BLOCK_N, GATED)
        sum_row = gl.convert_layout(scale_of, of_sums)
        theirs = gl.load(x_scales + sum_row, mask=gl.convert_layout(pair, of_sums) >= 0, other=0.0)
        total *= gl.load(scales + of_sum)[:, None] * theirs[None, :]
    store_pairs(total, pair, weights, out, N, not FEW, False, BLOCK_N, TOKENS, ACTIVATION)
    if arrivals is not None:
        _quantize_whole_group(
            out,
            pair,
            quantized,
            out_scales,
            arrivals,
            N,
            stride_out_scales,
            not FEW,
            TOKENS,
            BLOCK_N // 2,
            SIZE,
            LIMIT,
            SMALLEST,
        )


#: On an H200 the best in steps of Qwen3 30B-A3B.
_UNSORTED, _SORTED = Tile(64, 4, 4), Tile(128, 3, 4)

#: Pairs of a block up to which this kernel multiplies; by larger ones :mod:`atom_core.kernels.experts.hopper` does.
MAX_PAIRS = 32


class Left(NamedTuple):
    """What gate and up leave for down in FP8, in groups of :data:`COLUMNS`, beside their result."""

    quantized: QuantizedInput
    arrivals: torch.Tensor
    """int32, of each block and group; zeros in front of the launch."""


def room_to_leave(middle: torch.Tensor, blocks: int, dtype: torch.dtype) -> Left:
    """Memory without contents beside a result ``middle`` of so many blocks."""
    rows, size = middle.shape
    arrivals = torch.empty(blocks * (size // COLUMNS), dtype=torch.int32, device=middle.device)
    return Left(room(rows, size, InputForm(dtype, COLUMNS), middle.device), arrivals)


def takes(weight: torch.Tensor, rows: int, block: int, gated: bool) -> bool:
    """Whether on Hopper :func:`multiply_few_pairs` has a kernel for blocks of so many pairs."""
    _, out_features, in_features = weight.shape
    return (
        rows <= MAX_PAIRS
        and in_features % COLUMNS == 0
        and weight.data_ptr() % 16 == 0
        # A tile's gates and what they gate have one scale each.
        and not (block and gated and out_features // 2 % block)
    )


def multiply_few_pairs(
    x: torch.Tensor,
    x_scales: torch.Tensor,
    experts: torch.Tensor,
    blocks: Blocks | None,
    weights: torch.Tensor | None,
    weight: torch.Tensor,
    scales: torch.Tensor,
    out: torch.Tensor,
    held: Held,
    *,
    block: int,
    activation: int | None,
    overlap: bool,
    left: Left | None = None,
) -> None:
    """One product of experts into ``out``.

    What was in front of the kernel in front must be done when this starts: experts are read without waiting.

    Args:
        x: in e4m3, ``[T, K]`` with an activation, else ``[rows of out, K]``.
        x_scales: float32 ``[groups, rows of x]``.
        experts: int32 ``[T, k]``.
        blocks: the pairs in the order of their experts; None: of up to :data:`MAX_TOKENS` tokens, not sorted.
        weights: float32 ``[T, k]`` without an activation.
        weight: ``[E, N, K]`` in e4m3.
        scales: see :mod:`atom_core.kernels.fp8_experts`.
        out: ``[T k, N / 2]``, or of blocks ``[blocks x rows, N / 2]``, with an activation, else ``[T k, N]``.
        held: this rank's experts.
        block: rows and columns that have one scale; 0: each row has one.
        activation: one of ``ACTIVATIONS``' numbers, or None.
        overlap: see :func:`atom_core.kernels.triton_support.overlaps`.
        left: with an activation and scales of blocks, where ``out`` goes in FP8 as well.
    """
    assert left is None or (block == COLUMNS and activation is not None)
    _, out_features, in_features = weight.shape
    tokens, top_k = experts.shape
    tile = _UNSORTED if blocks is None else _SORTED
    rows, num_blocks = (MAX_TOKENS, tokens * top_k) if blocks is None else (blocks.rows, len(blocks.experts))
    expert_rows_fp8_hopper[(triton.cdiv(out_features, tile.rows), num_blocks)](
        x,
        x_scales,
        experts if blocks is None else None,
        None if blocks is None else blocks.experts,
        None if blocks is None else blocks.slots,
        weights,
        weight,
        scales,
        out,
        None if left is None else left.quantized.values,
        None if left is None else left.quantized.scales,
        None if left is None else left.arrivals,
        tokens,
        in_features,
        out_features,
        x_scales.shape[1],
        scales[0].numel(),
        0 if left is None else left.quantized.scales.shape[1],
        FIRST=held.first,
        COUNT=held.count,
        TOP_K=top_k,
        PLACES=triton.next_power_of_2(top_k),
        TOKENS=rows,
        BLOCK_N=tile.rows,
        COLUMNS=COLUMNS,
        SIZE=block,
        STAGES=tile.stages,
        ACTIVATION=activation,
        LIMIT=LIMIT,
        SMALLEST=SMALLEST,
        OVERLAP=overlap,
        num_warps=tile.warps,
        **launch_options(overlap),
    )
