"""Blocks of few routed tokens of one expert in FP8 on Hopper, in Gluon.

Routed tokens are the right operand of the matrix product and weight rows the left: ``wgmma`` needs 64 rows on the left
and multiplies FP8 directly. The first weight tiles are loaded before the input is ready, and scales are copied with
their tiles, as in :mod:`atom_core.kernels.fp8_block_linear.few_rows_hopper`. With block scales, the gate/up kernel also
writes its result in FP8, so down needs no launch to quantise it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from atom_core.kernels.eviction import EVICT_LAST
from atom_core.kernels.experts.few_routed_tokens_hopper import Tile
from atom_core.kernels.experts.few_tokens import MAX_TOKENS
from atom_core.kernels.experts.grouped import Blocks, LocalExperts
from atom_core.kernels.experts.hopper import input_rows, store_routed_tokens, tokens_of_block
from atom_core.kernels.fp8_block_linear.few_rows_hopper import scale_places
from atom_core.kernels.fp8_inputs import InputForm, QuantizedInput, empty_quantized
from atom_core.kernels.fp8_linear.quantize import narrowed
from atom_core.kernels.fp8_linear.reference import LIMIT, SMALLEST
from atom_core.kernels.launch import entry_kernel
from atom_core.kernels.linear.few_rows_hopper import all_copied, barrier, depend, load, ready, rows_of_tile
from atom_core.kernels.triton_support import cdiv, launch_options, next_power_of_2

_narrowed = gluon.jit(narrowed.fn)

#: Columns of a tile: the swizzle width of shared memory in bytes, and the size of a block with one scale.
COLUMNS = 128


@gluon.jit
def _ask_weight(
    tiles, of_tiles, at, scales, scale_row, tile, step, steps, K, place, TILES: gl.constexpr, HEIGHT: gl.constexpr,
    COLUMNS: gl.constexpr, SIZE: gl.constexpr,
):  # fmt: skip
    """Start to copy the weight tile of a step, and with blocks its scales, if the program has such a tile.

    ``HEIGHT``: rows from a tile's first one to the next tile's.
    """
    there = tile < TILES
    load(tiles.index(place), at + (tile * HEIGHT * K + step * COLUMNS), mask=there, eviction_policy="evict_first")
    if SIZE > 0:
        mine_at = scales + (scale_row + tile * HEIGHT) // SIZE * steps
        load(of_tiles.index(place), mine_at + step, mask=there)


@gluon.jit
def _ask_input(
    inputs,
    of_inputs,
    x_at,
    theirs_at,
    stride,
    used,
    known,
    tile,
    step,
    place,
    TILES: gl.constexpr,
    COLUMNS: gl.constexpr,
    SIZE: gl.constexpr,
):
    """Start to copy the input tile of a step, and with blocks its scales, if the program has such a weight tile."""
    there = tile < TILES
    load(inputs.index(place), x_at + step * COLUMNS, mask=used & there)
    if SIZE > 0:
        load(of_inputs.index(place), theirs_at + step * stride, mask=known & there)


@gluon.jit
def _next(tile, step, steps):
    """The tile and step after these."""
    step += 1
    ended = (step == steps).to(gl.int32)
    return tile + ended, step * (1 - ended)


@gluon.jit
def _quantize_whole_group(
    out,
    routed_token,
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
    """Quantise a group of a block's activated columns once all programs of the group have stored theirs.

    ``arrivals`` counts, for each block and group, the programs that have stored their ``WIDTH`` columns.
    """
    warps: gl.constexpr = gl.num_warps()
    sharing: gl.constexpr = GROUP // WIDTH
    group = gl.program_id(0) // sharing
    barrier()  # all stores of this program precede its arrival
    arrival = arrivals + gl.program_id(1) * (N // 2 // GROUP) + group
    if gl.atomic_add(arrival, 1, sem="acq_rel", scope="gpu") == sharing - 1:
        read: gl.constexpr = gl.BlockedLayout([4, 1], [32, 1], [1, warps], [0, 1])
        row = gl.convert_layout(routed_token, gl.SliceLayout(0, read))
        known = row >= 0
        if SORTED:
            row = gl.program_id(1) * TOKENS + gl.arange(0, TOKENS, gl.SliceLayout(0, read))
        column = group * GROUP + gl.arange(0, GROUP, gl.SliceLayout(1, read))
        at = row.to(gl.int64)[None, :] * (N // 2) + column[:, None]
        # Other programs have stored these values since this kernel started.
        numbers = gl.load(out + at, mask=known[None, :], other=0.0, cache_modifier=".cg").to(gl.float32)
        scale = gl.maximum(gl.max(gl.abs(numbers), 0), SMALLEST) / LIMIT
        gl.store(out_scales + group * stride_out_scales + row, scale, mask=known, eviction_policy=EVICT_LAST)
        stored = _narrowed(numbers, (1.0 / scale)[None, :], LIMIT, 1.0, quantized.dtype.element_ty)
        gl.store(quantized + at, stored, mask=known[None, :], eviction_policy=EVICT_LAST)


@entry_kernel
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
    TILES: gl.constexpr,
    ACTIVATION: gl.constexpr,
    LIMIT: gl.constexpr,
    SMALLEST: gl.constexpr,
    OVERLAP: gl.constexpr,
):
    """A block of routed tokens of one expert by ``TILES`` times ``BLOCK_N`` rows of its weight, tile by tile.

    The next tile is copied while this one is multiplied; see :func:`multiply_few_routed_tokens`.
    With an activation, rows of ``x`` are tokens and rows of ``out`` are slots, or routed tokens without ``slots``.
    Without, ``x`` has those rows, rows of ``out`` are routed tokens, and results are multiplied by the routing weight.
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
        dtype, [STAGES, BLOCK_N, COLUMNS], gl.NVMMASharedLayout.get_default_for([BLOCK_N, COLUMNS], dtype)
    )
    inputs = gl.allocate_shared_memory(
        dtype, [STAGES, TOKENS, COLUMNS], gl.NVMMASharedLayout.get_default_for([TOKENS, COLUMNS], dtype)
    )
    column = gl.arange(0, COLUMNS, gl.SliceLayout(0, copied))
    HEIGHT: gl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    first_tile = gl.program_id(0) * TILES
    none = first_tile * 0  # a number of the GPU's
    row = rows_of_tile(first_tile, gl.arange(0, BLOCK_N, gl.SliceLayout(1, copied)), N, BLOCK_N, GATED)
    at = weight + (expert * N + row)[:, None] * K + column[None, :]
    steps = K // COLUMNS
    line: gl.constexpr = gl.BlockedLayout([1], [32], [warps], [0])
    of_tiles, of_inputs = scale_places(STAGES, BLOCK_N, TOKENS)
    scales += expert * stride_scales
    scale_row = rows_of_tile(first_tile, gl.arange(0, BLOCK_N, line), N, BLOCK_N, GATED)
    if SIZE > 0:
        gl.static_assert(SIZE == COLUMNS)
    tile = none
    step = none
    for stage in gl.static_range(ahead):
        _ask_weight(
            tiles, of_tiles, at, scales, scale_row, tile, step, steps, K, stage, TILES, HEIGHT, COLUMNS, SIZE
        )  # fmt: skip
        async_copy.commit_group()
        tile, step = _next(tile, step, steps)
    if OVERLAP:
        depend("griddepcontrol.wait; // $0")
        # Not earlier: the next kernel reads the experts without waiting for this one.
        depend("griddepcontrol.launch_dependents; // $0")
    x_routed_token = gl.convert_layout(routed_token, gl.SliceLayout(1, copied))
    scale_routed_token = gl.convert_layout(routed_token, line)
    x_row = input_rows(x_routed_token, not FEW, GATED, TOP_K, TOKENS, gl.SliceLayout(1, copied))
    scale_of = input_rows(scale_routed_token, not FEW, GATED, TOP_K, TOKENS, line)
    used = (x_routed_token >= 0)[:, None]
    known = scale_routed_token >= 0
    x_at = x + x_row.to(gl.int64)[:, None] * K + column[None, :]
    theirs_at = x_scales + scale_of
    tile = none
    step = none
    for stage in gl.static_range(ahead):
        _ask_input(
            inputs, of_inputs, x_at, theirs_at, stride_x_scales, used, known, tile, step, stage, TILES, COLUMNS, SIZE
        )
        async_copy.commit_group()
        tile, step = _next(tile, step, steps)
    zeros = gl.zeros([BLOCK_N, TOKENS], gl.float32, summed)
    place = 0
    filled = ahead
    for now in range(TILES):
        total = zeros
        for _ in range(steps):
            ready(ahead - 1)
            right = inputs.index(place).permute((1, 0))
            if SIZE > 0:
                total_or_partial = warpgroup_mma(tiles.index(place), right, zeros, use_acc=False, is_async=True)
                # Before the copies, or Triton has one barrier more.
                mine = of_tiles.index(place).load(of_rows)
                theirs = of_inputs.index(place).load(of_sums)
            else:
                total_or_partial = warpgroup_mma(tiles.index(place), right, total, is_async=True)
            # All warps have finished with the tile of the previous step.
            _ask_weight(
                tiles, of_tiles, at, scales, scale_row, tile, step, steps, K, filled, TILES, HEIGHT, COLUMNS, SIZE
            )  # fmt: skip
            _ask_input(
                inputs, of_inputs, x_at, theirs_at, stride_x_scales, used, known, tile, step, filled, TILES, COLUMNS,
                SIZE,
            )  # fmt: skip
            async_copy.commit_group()
            tile, step = _next(tile, step, steps)
            if SIZE > 0:
                partial = warpgroup_mma_wait(0, [total_or_partial])
                total += partial * mine[:, None] * theirs[None, :]
            else:
                total = warpgroup_mma_wait(0, [total_or_partial])
            place = (place + 1) % STAGES
            filled = (filled + 1) % STAGES
        if now == TILES - 1:
            all_copied()
        if SIZE == 0:
            of_sum = rows_of_tile(first_tile + now, gl.arange(0, BLOCK_N, of_rows), N, BLOCK_N, GATED)
            sum_row = gl.convert_layout(scale_of, of_sums)
            theirs = gl.load(x_scales + sum_row, mask=gl.convert_layout(routed_token, of_sums) >= 0, other=0.0)
            total *= gl.load(scales + of_sum)[:, None] * theirs[None, :]
        store_routed_tokens(
            total, routed_token, weights, out, first_tile + now, N, not FEW, False, BLOCK_N, TOKENS, ACTIVATION
        )
    if arrivals is not None:
        _quantize_whole_group(
            out,
            routed_token,
            quantized,
            out_scales,
            arrivals,
            N,
            stride_out_scales,
            not FEW,
            TOKENS,
            TILES * BLOCK_N // 2,
            SIZE,
            LIMIT,
            SMALLEST,
        )


#: The best on an H200 in steps of Qwen3 30B-A3B.
_UNSORTED, _SORTED = Tile(64, 4, 4), Tile(128, 3, 4)

#: Largest block that this kernel multiplies; :mod:`atom_core.kernels.experts.hopper` multiplies larger ones.
MAX_BLOCK = 32


class QuantizedIntermediate(NamedTuple):
    """The FP8 copy of the gate/up result, in groups of :data:`COLUMNS`, that gate/up writes for down."""

    quantized: QuantizedInput
    arrivals: torch.Tensor
    """int32, one counter for each block and group; zeros before the launch."""


def empty_fp8_out(intermediate: torch.Tensor, blocks: int, dtype: torch.dtype) -> QuantizedIntermediate:
    """Uninitialised memory for the FP8 copy of ``intermediate``, which has ``blocks`` blocks."""
    rows, size = intermediate.shape
    arrivals = torch.empty(blocks * (size // COLUMNS), dtype=torch.int32, device=intermediate.device)
    return QuantizedIntermediate(empty_quantized(rows, size, InputForm(dtype, COLUMNS), intermediate.device), arrivals)


def takes(weight: torch.Tensor, rows: int, block: int, gated: bool) -> bool:
    """Whether :func:`multiply_few_routed_tokens` supports blocks of ``rows`` routed tokens on Hopper."""
    _, out_features, in_features = weight.shape
    return (
        rows <= MAX_BLOCK
        and in_features % COLUMNS == 0
        and weight.data_ptr() % 16 == 0
        # The gate rows of a tile, and their results, must share a scale.
        and not (block and gated and out_features // 2 % block)
    )


#: Programs that run at the same time on a Hopper: five on each of its multiprocessors, or four with a stage more. With
#: several tiles one of ``down`` needs memory for its results beside the tiles, and four have room.
_AT_ONCE, _LONG_AT_ONCE = 5 * 132, 4 * 132
#: The most steps of a program with several tiles: longer ones have too small a part of their time without loads.
_MOST_STEPS = 32


class Pipeline(NamedTuple):
    """How a program goes through its part of a weight."""

    tiles: int
    """Weight tiles one after the other."""
    stages: int
    """Tiles that are there or on their way."""


def pipeline_of_program(
    tokens: int, local_experts: LocalExperts, out_features: int, in_features: int, gated: bool
) -> Pipeline:
    """The pipeline of a program, of up to :data:`MAX_TOKENS` tokens, not sorted.

    It has so many tiles that all programs run at the same time, where that can be: one that ends and one that starts
    load little. It has a stage more where they still do. The number of experts is that of tokens that are routed at
    random.
    """
    if not local_experts.whole:
        return Pipeline(1, _UNSORTED.stages)
    routed = local_experts.count - local_experts.shared
    of_token = (local_experts.top_k - local_experts.shared) / routed
    needed = (routed * (1 - (1 - of_token) ** tokens) + local_experts.shared) * (out_features // _UNSORTED.rows)
    tiles = _tiles_of_program(needed, out_features, in_features, gated)
    has_room = needed <= tiles * _LONG_AT_ONCE
    return Pipeline(tiles, _UNSORTED.stages + 1 if has_room else _UNSORTED.stages)


def _tiles_of_program(needed: float, out_features: int, in_features: int, gated: bool) -> int:
    """Weight tiles of a program, where all programs together have ``needed`` of them."""
    if needed <= _AT_ONCE:
        return 1
    most, at_once = _MOST_STEPS * COLUMNS // in_features, _LONG_AT_ONCE
    if gated:
        # A group of the result has one scale, and is one program's at most.
        most, at_once = min(most, COLUMNS * 2 // _UNSORTED.rows), _AT_ONCE
    for tiles in (2, 4, 8):
        fit = needed <= tiles * at_once
        if fit and tiles <= most and out_features % (tiles * _UNSORTED.rows) == 0:
            return tiles
    return 1


def multiply_few_routed_tokens(
    x: torch.Tensor,
    x_scales: torch.Tensor,
    experts: torch.Tensor,
    blocks: Blocks | None,
    weights: torch.Tensor | None,
    weight: torch.Tensor,
    scales: torch.Tensor,
    out: torch.Tensor,
    local_experts: LocalExperts,
    *,
    block: int,
    activation: int | None,
    overlap: bool,
    fp8_out: QuantizedIntermediate | None = None,
) -> None:
    """One product of experts, into ``out``.

    Experts are read without waiting for the previous kernel, so they must be older than it.

    Args:
        x: in e4m3, ``[T, K]`` with an activation, else ``[rows of out, K]``.
        x_scales: float32 ``[groups, rows of x]``.
        experts: int32 ``[T, k]``.
        blocks: the routed tokens sorted by expert; None: up to :data:`MAX_TOKENS` tokens, not sorted.
        weights: float32 ``[T, k]`` without an activation.
        weight: ``[E, N, K]`` in e4m3.
        scales: see :mod:`atom_core.kernels.fp8_experts`.
        out: ``[T k, N / 2]``, or of blocks ``[blocks x rows, N / 2]``, with an activation, else ``[T k, N]``.
        local_experts: the local experts.
        block: size of the square blocks that share a scale; 0: one scale per row.
        activation: a value of ``ACTIVATIONS``, or None.
        overlap: see :func:`atom_core.kernels.triton_support.overlaps`.
        fp8_out: with an activation and block scales, where to also write ``out`` in FP8.
    """
    assert fp8_out is None or (block == COLUMNS and activation is not None)
    _, out_features, in_features = weight.shape
    tokens, top_k = experts.shape
    tile = _UNSORTED if blocks is None else _SORTED
    rows, num_blocks = (MAX_TOKENS, tokens * top_k) if blocks is None else (blocks.rows, len(blocks.experts))
    tiles, stages = 1, tile.stages
    if blocks is None:
        tiles, stages = pipeline_of_program(tokens, local_experts, out_features, in_features, activation is not None)
    expert_rows_fp8_hopper[(cdiv(out_features, tiles * tile.rows), num_blocks)](
        x,
        x_scales,
        experts if blocks is None else None,
        None if blocks is None else blocks.experts,
        None if blocks is None else blocks.slots,
        weights,
        weight,
        scales,
        out,
        None if fp8_out is None else fp8_out.quantized.values,
        None if fp8_out is None else fp8_out.quantized.scales,
        None if fp8_out is None else fp8_out.arrivals,
        tokens,
        in_features,
        out_features,
        x_scales.shape[1],
        scales[0].numel(),
        0 if fp8_out is None else fp8_out.quantized.scales.shape[1],
        FIRST=local_experts.first,
        COUNT=local_experts.count,
        TOP_K=top_k,
        PLACES=next_power_of_2(top_k),
        TOKENS=rows,
        BLOCK_N=tile.rows,
        COLUMNS=COLUMNS,
        SIZE=block,
        STAGES=stages,
        TILES=tiles,
        ACTIVATION=activation,
        LIMIT=LIMIT,
        SMALLEST=SMALLEST,
        OVERLAP=overlap,
        num_warps=tile.warps,
        **launch_options(overlap),
    )
