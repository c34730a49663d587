"""The down product of few tokens' experts on Hopper, in Gluon, by a persistent kernel.

The experts are known before the input is ready. While the first product ends, each program finds the experts that have
tokens and starts to copy the first columns of its first rows. It then goes through tiles of one expert after the other,
and copies the next tile while it multiplies and stores the current one. So starts and ends of programs cost no memory
time, and routed tokens whose expert is already read need no program.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from atom_core.kernels.eviction import EVICT_LAST
from atom_core.kernels.experts.blocked_layout import BLOCK_SIZE
from atom_core.kernels.experts.hopper import column_at, row_at
from atom_core.kernels.launch import entry_kernel
from atom_core.kernels.linear.few_rows_hopper import all_copied, depend, load, ready
from atom_core.kernels.linear.tiles import aligned
from atom_core.kernels.triton_support import cdiv, launch_options, multiprocessors, next_power_of_2

if TYPE_CHECKING:
    from atom_core.kernels.experts import ExpertWeights
    from atom_core.kernels.experts.grouped import LocalExperts

#: Largest number of routed tokens: each program compares all of them.
MAX_ROUTED_TOKENS = 128
#: Weight rows that ``wgmma`` multiplies, programs per multiprocessor, and bytes of a row that each loads ahead at most.
_ROWS, _PROGRAMS, _AHEAD = 64, 2, 1024


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
def _weight_rows(tile, lane, N, BLOCK_N: gl.constexpr):
    """The weight rows of a tile; indices past the last row repeat it."""
    return gl.minimum(tile * BLOCK_N + lane, N - 1)


@entry_kernel
@gluon.jit(do_not_specialize=["T"])
def down_of_few_hopper(
    x,
    experts,
    weights,
    weight,
    bias,
    out,
    T,
    K,
    N,
    FIRST: gl.constexpr,
    COUNT: gl.constexpr,
    TOP_K: gl.constexpr,
    PLACES: gl.constexpr,
    TOKENS: gl.constexpr,
    ROUTED_TOKENS: gl.constexpr,
    BLOCK_N: gl.constexpr,
    COLUMNS: gl.constexpr,
    STAGES: gl.constexpr,
    BLOCKED: gl.constexpr,
    OVERLAP: gl.constexpr,
):
    """See :func:`down_of_few`. A tile has ``BLOCK_N`` rows of an expert's weight and ``COLUMNS`` columns per copy."""
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
    turns = (N + BLOCK_N - 1) // BLOCK_N
    items = (gl.max(first, 0) + 1) * turns
    item = gl.program_id(0)
    if item >= items:
        # Wait anyway, so that kernels that wait for this one also wait for those before it.
        if OVERLAP:
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
    at = weight + row_at(expert * N + _weight_rows(item % turns, lane, N, BLOCK_N), K, BLOCKED)[:, None] + weight_column
    for stage in gl.static_range(ahead):
        load(tiles.index(stage), at + stage * COLUMNS * stride, eviction_policy="evict_first")
        async_copy.commit_group()
    if OVERLAP:
        depend("griddepcontrol.wait; // $0")
        depend("griddepcontrol.launch_dependents; // $0")
    x_at = x + routed_token.to(gl.int64)[:, None] * K + column
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
        next_row = next_expert * N + _weight_rows(sought % turns, lane, N, BLOCK_N)
        next_at = weight + row_at(next_row, K, BLOCKED)[:, None] + weight_column
        next_x_at = x + next_routed.to(gl.int64)[:, None] * K + column
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
            row = _weight_rows(tile, gl.arange(0, BLOCK_N, gl.SliceLayout(1, summed)), N, BLOCK_N)
            total += gl.load(bias + expert * N + row).to(gl.float32)[:, None]
        to = tile * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(1, stored))
        out_routed_token = gl.convert_layout(routed_token, of_stores)
        share = gl.load(weights + out_routed_token, mask=out_routed_token >= 0, other=0.0)
        result = gl.convert_layout(total, stored) * share[None, :]
        mask = (out_routed_token >= 0)[None, :] & (to < N)[:, None]
        gl.store(
            out + out_routed_token.to(gl.int64)[None, :] * N + to[:, None],
            result.to(out.dtype.element_ty),
            mask=mask,
            eviction_policy=EVICT_LAST,
        )
        item, expert, routed_token, at, x_at = then, next_expert, next_routed, next_at, next_x_at
    all_copied()


def takes_down_of_few(x: torch.Tensor, weight: torch.Tensor, num_routed_tokens: int) -> bool:
    """Whether :func:`down_of_few` supports these operands on Hopper."""
    return (
        weight.itemsize == x.itemsize == 2
        and weight.shape[2] % 64 == 0
        and num_routed_tokens <= MAX_ROUTED_TOKENS
        and aligned(x)
        and weight.data_ptr() % 16 == 0
    )


def down_of_few_key(num_routed_tokens: int) -> int | None:
    """What :func:`down_of_few` is compiled for; None: it does not take so many routed tokens."""
    return max(32, next_power_of_2(num_routed_tokens)) if num_routed_tokens <= MAX_ROUTED_TOKENS else None


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
    weight = layer.down
    _, out_features, in_features = weight.shape
    columns = 128 if in_features % 128 == 0 else 64
    stages = 1 + min(_AHEAD // (columns * weight.itemsize), in_features // columns)
    items = min(experts.numel(), local_experts.count) * cdiv(out_features, _ROWS)
    down_of_few_hopper[(min(items, _PROGRAMS * multiprocessors(x.device)),)](
        x,
        experts,
        weights,
        weight,
        layer.down_bias,
        out,
        len(experts),
        in_features,
        out_features,
        FIRST=local_experts.first,
        COUNT=local_experts.count,
        TOP_K=local_experts.top_k,
        PLACES=next_power_of_2(local_experts.top_k),
        TOKENS=tokens,
        ROUTED_TOKENS=down_of_few_key(experts.numel()),
        BLOCK_N=_ROWS,
        COLUMNS=columns,
        STAGES=stages,
        BLOCKED=layer.blocked,
        OVERLAP=overlap,
        num_warps=4,
        **launch_options(overlap),
    )
