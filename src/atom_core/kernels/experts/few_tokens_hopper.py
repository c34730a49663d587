"""Both products of few tokens' experts on Hopper, in Gluon, by a persistent kernel.

Each program finds the experts that have tokens and starts to copy the first columns of its first rows. It then goes
through tiles of one expert after the other, and copies the next tile while it multiplies and stores the current one. So
starts and ends of programs cost no memory time, and routed tokens whose expert is already read need no program.

The down product knows the experts before its input is ready, and starts to copy while the first product ends.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from atom_core.kernels.eviction import EVICT_LAST
from atom_core.kernels.experts.blocked_layout import BLOCK_SIZE
from atom_core.kernels.experts.hopper import column_at, row_at
from atom_core.kernels.launch import entry_kernel
from atom_core.kernels.linear.few_rows_hopper import activated, all_copied, depend, load, ready
from atom_core.kernels.linear.tiles import aligned
from atom_core.kernels.triton_support import cdiv, launch_options, multiprocessors, next_power_of_2

if TYPE_CHECKING:
    from atom_core.kernels.experts import ExpertWeights
    from atom_core.kernels.experts.grouped import LocalExperts

#: Largest number of routed tokens: each program compares all of them.
MAX_ROUTED_TOKENS = 128
#: Weight rows that ``wgmma`` multiplies.
_ROWS = 64


class Tile(NamedTuple):
    """How a product is shared out."""

    programs: int
    """Of a multiprocessor."""
    ahead: int
    """The most bytes of a row that a program copies ahead."""


#: Few programs have equal shares: eight tokens of Qwen3.5 35B-A3B have some 912 tiles in the first product, 3.5 for each
#: of two programs a multiprocessor, so four for some.
_GATE_UP, _DOWN = Tile(programs=1, ahead=2048), Tile(programs=2, ahead=1024)


@gluon.jit
def _number_experts(chosen, FIRST: gl.constexpr, COUNT: gl.constexpr):
    """For each of ``chosen [ROUTED_TOKENS]``, the number of its expert if it is the expert's first, else -1.

    Also the experts, counted from ``FIRST``. Only local experts are numbered.
    """
    ROUTED_TOKENS: gl.constexpr = chosen.shape[0]
    square: gl.constexpr = gl.BlockedLayout([1, ROUTED_TOKENS // 4], [8, 4], [gl.num_warps(), 1], [1, 0])
    of_rows: gl.constexpr = gl.SliceLayout(1, square)
    of_columns: gl.constexpr = gl.SliceLayout(0, square)
    expert = gl.convert_layout(chosen, of_rows)
    before = gl.arange(0, ROUTED_TOKENS, of_columns)[None, :] < gl.arange(0, ROUTED_TOKENS, of_rows)[:, None]
    same = before & (expert[:, None] == gl.convert_layout(chosen, of_columns)[None, :])
    first = (gl.sum(same.to(gl.int32), 1) == 0) & (expert >= FIRST) & (expert < FIRST + COUNT)
    earlier = gl.where(before, gl.convert_layout(first.to(gl.int32), of_columns)[None, :], 0)
    return gl.where(first, gl.sum(earlier, 1), -1), expert - FIRST


@gluon.jit
def _expert_and_tokens(place, first, expert, goes_to, FIRST: gl.constexpr, TOP_K: gl.constexpr, layout: gl.constexpr):
    """The expert numbered ``place``, and ``[TOKENS]`` each token's routed token there; -1: not routed there.

    ``goes_to``: ``[TOKENS, PLACES]`` experts.
    """
    mine = gl.sum(gl.where(first == place, expert, 0), 0)
    column = gl.arange(0, goes_to.shape[1], gl.SliceLayout(0, goes_to.type.layout))
    # A token is routed to an expert at most once.
    found = gl.max(gl.where(goes_to == mine + FIRST, column[None, :] + 1, 0), 1) - 1
    found = gl.convert_layout(found, layout)
    routed_token = gl.where(found >= 0, gl.arange(0, goes_to.shape[0], layout) * TOP_K + found, -1)
    return mine.to(gl.int64), routed_token


@gluon.jit
def _weight_rows(tile, lane, N, BLOCK_N: gl.constexpr, GATED: gl.constexpr):
    """The weight rows of a tile, as of :func:`atom_core.kernels.linear.few_rows_hopper.weight_rows`."""
    if GATED:
        half = N // 2
        row = gl.minimum(tile * (BLOCK_N // 2) + lane // 16 * 8 + lane % 8, half - 1) + lane // 8 % 2 * half
    else:
        row = gl.minimum(tile * BLOCK_N + lane, N - 1)
    return row


@gluon.jit
def _input_rows(routed_token, GATED: gl.constexpr, layout: gl.constexpr):
    """The input rows of a tile's tokens: those of tokens, or those of routed tokens."""
    row = gl.arange(0, routed_token.shape[0], layout) if GATED else routed_token
    return row.to(gl.int64)[:, None]


@entry_kernel
@gluon.jit(do_not_specialize=["T"])
def experts_of_few_hopper(
    x,
    experts,
    weights,
    weight,
    bias,
    out,
    T,
    K,
    N,
    stride_x,
    FIRST: gl.constexpr,
    COUNT: gl.constexpr,
    TOP_K: gl.constexpr,
    PLACES: gl.constexpr,
    TOKENS: gl.constexpr,
    ROUTED_TOKENS: gl.constexpr,
    BLOCK_N: gl.constexpr,
    COLUMNS: gl.constexpr,
    STAGES: gl.constexpr,
    ACTIVATION: gl.constexpr,
    BLOCKED: gl.constexpr,
    OVERLAP: gl.constexpr,
):
    """A tile has ``BLOCK_N`` rows of an expert's weight and ``COLUMNS`` columns per copy.

    With an activation it is the first product: rows of ``x`` are tokens. Without, they are routed tokens, and results
    are multiplied by the routing weight.
    """
    GATED: gl.constexpr = ACTIVATION is not None
    if OVERLAP and GATED:
        depend("griddepcontrol.wait; // $0")
        # Not earlier: the second product reads the experts without waiting for this kernel.
        depend("griddepcontrol.launch_dependents; // $0")
    dtype: gl.constexpr = weight.dtype.element_ty
    warps: gl.constexpr = gl.num_warps()
    ahead: gl.constexpr = STAGES - 1
    steps = K // COLUMNS
    copied: gl.constexpr = gl.BlockedLayout([1, 8], [32 * 8 // COLUMNS, COLUMNS // 8], [warps, 1], [1, 0])
    of_copies: gl.constexpr = gl.SliceLayout(1, copied)
    summed: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, TOKENS, 16])
    line: gl.constexpr = gl.BlockedLayout([1], [32], [warps], [0])
    table: gl.constexpr = gl.BlockedLayout([1, PLACES], [32, 1], [warps, 1], [1, 0])
    stored: gl.constexpr = gl.BlockedLayout([1, 1], [32, 1], [1, warps], [0, 1])
    of_stores: gl.constexpr = gl.SliceLayout(0, stored)
    # Written before the previous kernel started, but the L1 cache may have older values.
    each = gl.arange(0, ROUTED_TOKENS, line)
    chosen = gl.load(experts + each, mask=each < T * TOP_K, other=FIRST - 1, cache_modifier=".cg")
    first, expert_of = _number_experts(chosen, FIRST, COUNT)
    token = gl.arange(0, TOKENS, gl.SliceLayout(1, table))[:, None]
    column = gl.arange(0, PLACES, gl.SliceLayout(0, table))[None, :]
    known = (token < T) & (column < TOP_K)
    goes_to = gl.load(experts + token * TOP_K + column, mask=known, other=FIRST - 1, cache_modifier=".cg")
    # Of the outputs, which a gate halves.
    WIDTH: gl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    width = N // 2 if GATED else N
    turns = (width + WIDTH - 1) // WIDTH
    items = (gl.max(first, 0) + 1) * turns
    item = gl.program_id(0)
    if item >= items:
        # Wait anyway, so that kernels that wait for this one also wait for those before it.
        if OVERLAP and not GATED:
            depend("griddepcontrol.wait; // $0")
        return

    tiles = gl.allocate_shared_memory(
        dtype, [STAGES, BLOCK_N, COLUMNS], gl.NVMMASharedLayout.get_default_for([BLOCK_N, COLUMNS], dtype)
    )
    inputs = gl.allocate_shared_memory(
        dtype, [STAGES, TOKENS, COLUMNS], gl.NVMMASharedLayout.get_default_for([TOKENS, COLUMNS], dtype)
    )
    lane = gl.arange(0, BLOCK_N, of_copies)
    column = gl.arange(0, COLUMNS, gl.SliceLayout(0, copied))[None, :]
    expert, routed_token = _expert_and_tokens(item // turns, first, expert_of, goes_to, FIRST, TOP_K, of_copies)
    stride: gl.constexpr = BLOCK_SIZE if BLOCKED else 1
    weight_column = column_at(column, BLOCKED)
    this_row = expert * N + _weight_rows(item % turns, lane, N, BLOCK_N, GATED)
    at = weight + row_at(this_row, K, BLOCKED)[:, None] + weight_column
    for stage in gl.static_range(ahead):
        load(tiles.index(stage), at + stage * COLUMNS * stride, eviction_policy="evict_first")
        async_copy.commit_group()
    if OVERLAP and not GATED:
        depend("griddepcontrol.wait; // $0")
        depend("griddepcontrol.launch_dependents; // $0")
    x_at = x + _input_rows(routed_token, GATED, of_copies) * stride_x + column
    for stage in gl.static_range(ahead):
        load(inputs.index(stage), x_at + stage * COLUMNS, mask=(routed_token >= 0)[:, None])
        async_copy.commit_group()
    read = item * 0
    filled = read + ahead
    while item < items:
        # Prepare the next tile while the columns of this one arrive; after the last, repeat it without copies.
        then = item + gl.num_programs(0)
        sought = gl.minimum(then, items - 1)
        next_expert, next_routed = _expert_and_tokens(
            sought // turns, first, expert_of, goes_to, FIRST, TOP_K, of_copies
        )
        next_row = next_expert * N + _weight_rows(sought % turns, lane, N, BLOCK_N, GATED)
        next_at = weight + row_at(next_row, K, BLOCKED)[:, None] + weight_column
        next_x_at = x + _input_rows(next_routed, GATED, of_copies) * stride_x + column
        total = gl.zeros([BLOCK_N, TOKENS], gl.float32, summed)
        for step in range(ahead, steps):
            ready(ahead - 1)
            total = warpgroup_mma(tiles.index(read), inputs.index(read).permute((1, 0)), total, is_async=True)
            load(tiles.index(filled), at + step * COLUMNS * stride, eviction_policy="evict_first")
            load(inputs.index(filled), x_at + step * COLUMNS, mask=(routed_token >= 0)[:, None])
            async_copy.commit_group()
            read = (read + 1) % STAGES
            filled = (filled + 1) % STAGES
            total = warpgroup_mma_wait(0, [total])
        for step in gl.static_range(ahead):
            ready(ahead - 1)
            total = warpgroup_mma(tiles.index(read), inputs.index(read).permute((1, 0)), total, is_async=True)
            load(
                tiles.index(filled), next_at + step * COLUMNS * stride, mask=then < items, eviction_policy="evict_first"
            )
            load(inputs.index(filled), next_x_at + step * COLUMNS, mask=((next_routed >= 0) & (then < items))[:, None])
            async_copy.commit_group()
            read = (read + 1) % STAGES
            filled = (filled + 1) % STAGES
            total = warpgroup_mma_wait(0, [total])
        tile = item % turns
        if bias is not None:
            row = _weight_rows(tile, gl.arange(0, BLOCK_N, gl.SliceLayout(1, summed)), N, BLOCK_N, GATED)
            total += gl.load(bias + expert * N + row).to(gl.float32)[:, None]
        if GATED:
            total = activated(total, BLOCK_N, TOKENS, ACTIVATION, out.dtype.element_ty)
        to = tile * WIDTH + gl.arange(0, WIDTH, gl.SliceLayout(1, stored))
        out_routed_token = gl.convert_layout(routed_token, of_stores)
        result = gl.convert_layout(total, stored)
        if not GATED:
            result *= gl.load(weights + out_routed_token, mask=out_routed_token >= 0, other=0.0)[None, :]
        mask = (out_routed_token >= 0)[None, :] & (to < width)[:, None]
        gl.store(
            out + out_routed_token.to(gl.int64)[None, :] * width + to[:, None],
            result.to(out.dtype.element_ty),
            mask=mask,
            eviction_policy=EVICT_LAST,
        )
        item, expert, routed_token, at, x_at = then, next_expert, next_routed, next_at, next_x_at
    all_copied()


def takes_few(x: torch.Tensor, weight: torch.Tensor, num_routed_tokens: int) -> bool:
    """Whether :func:`gate_up_of_few` or :func:`down_of_few` supports these operands on Hopper."""
    return (
        weight.itemsize == x.itemsize == 2
        and weight.shape[2] % 64 == 0
        and num_routed_tokens <= MAX_ROUTED_TOKENS
        and aligned(x)
        and weight.data_ptr() % 16 == 0
    )


def few_key(num_routed_tokens: int) -> int | None:
    """What both products are compiled for; None: they do not take so many routed tokens."""
    return max(32, next_power_of_2(num_routed_tokens)) if num_routed_tokens <= MAX_ROUTED_TOKENS else None


def gate_up_of_few(
    x: torch.Tensor,
    experts: torch.Tensor,
    layer: ExpertWeights,
    out: torch.Tensor,
    local_experts: LocalExperts,
    activation: int,
    tokens: int,
    overlap: bool,
) -> None:
    """Multiply each token's row of ``x`` by the gate and up weights of its experts, and activate it, into ``out``.

    Rows of routed tokens whose expert is not local are not written.

    Args:
        x: ``[T, K]``.
        experts: int32 ``[T, k]``.
        layer: ``gate_up [E, 2 N, K]``, in the dtype of ``x``, and ``gate_up_bias [E, 2 N]`` are used.
        out: ``[T k, N]``.
        local_experts: the experts of ``layer``.
        activation: a value of ``ACTIVATIONS``.
        tokens: rows of an input tile, at least 16 and at least ``T``.
        overlap: see :func:`atom_core.kernels.triton_support.overlaps`.
    """
    _multiply(
        x, experts, None, layer.gate_up, layer.gate_up_bias, out, _GATE_UP, local_experts, tokens,
        ACTIVATION=activation, BLOCKED=layer.blocked, OVERLAP=overlap,
    )  # fmt: skip


def down_of_few(
    x: torch.Tensor,
    experts: torch.Tensor,
    weights: torch.Tensor,
    layer: ExpertWeights,
    out: torch.Tensor,
    local_experts: LocalExperts,
    tokens: int,
    overlap: bool,
) -> None:
    """Multiply each routed token's row of ``x`` by its expert's down weight and its routing weight, into ``out``.

    ``experts`` are read without waiting for the previous kernel, so they must be older than it. Rows of routed tokens
    whose expert is not local are not written.

    Args:
        x: ``[T k, K]``, contiguous.
        experts: int32 ``[T, k]``.
        weights: float32 ``[T, k]``.
        layer: ``down [E, N, K]``, in the dtype of ``x``, and ``down_bias [E, N]`` are used.
        out: ``[T k, N]``.
        local_experts: the experts of ``layer``.
        tokens: rows of an input tile, at least 16 and at least ``T``.
        overlap: see :func:`atom_core.kernels.triton_support.overlaps`.
    """
    _multiply(
        x, experts, weights, layer.down, layer.down_bias, out, _DOWN, local_experts, tokens,
        ACTIVATION=None, BLOCKED=layer.blocked, OVERLAP=overlap,
    )  # fmt: skip


def _multiply(
    x: torch.Tensor,
    experts: torch.Tensor,
    weights: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    tile: Tile,
    local_experts: LocalExperts,
    tokens: int,
    **constants: int | None,
) -> None:
    _, out_features, in_features = weight.shape
    columns = 128 if in_features % 128 == 0 else 64
    stages = 1 + min(tile.ahead // (columns * weight.itemsize), in_features // columns)
    items = min(experts.numel(), local_experts.count) * cdiv(out_features, _ROWS)
    experts_of_few_hopper[(min(items, tile.programs * multiprocessors(x.device)),)](
        x,
        experts,
        weights,
        weight,
        bias,
        out,
        len(experts),
        in_features,
        out_features,
        x.stride(0),
        FIRST=local_experts.first,
        COUNT=local_experts.count,
        TOP_K=local_experts.top_k,
        PLACES=next_power_of_2(local_experts.top_k),
        TOKENS=tokens,
        ROUTED_TOKENS=few_key(experts.numel()),
        BLOCK_N=_ROWS,
        COLUMNS=columns,
        STAGES=stages,
        num_warps=4,
        **constants,
        **launch_options(bool(constants["OVERLAP"])),
    )
