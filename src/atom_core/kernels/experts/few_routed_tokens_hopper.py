"""Blocks of few routed tokens of one expert, in 16 bits on Hopper, in Gluon.

Routed tokens are the right operand of the matrix product and weight rows the left: ``wgmma`` needs 64 rows on the left
and then reads both operands from shared memory. The second product knows its experts when it starts, so it loads its
first weight tiles before its input is ready.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from atom_core.kernels.experts.blocked_layout import BLOCK_SIZE
from atom_core.kernels.experts.hopper import input_rows, row_at, sorted_routed_tokens, store_routed_tokens
from atom_core.kernels.launch import entry_kernel
from atom_core.kernels.linear.few_rows_hopper import LAG, all_copied, depend, load, ready, weight_rows
from atom_core.kernels.triton_support import cdiv, launch_options

if TYPE_CHECKING:
    from atom_core.kernels.experts.grouped import Blocks

#: Columns of a tile: 128 bytes, the swizzle width of shared memory.
COLUMNS = 64


@gluon.jit
def _ask_weight(tiles, at, step, steps, place, apart: gl.constexpr):
    """Start to copy the weight tile of a step, if the step exists."""
    load(tiles.index(place), at + step * apart, mask=step < steps, eviction_policy="evict_first")


@gluon.jit
def _ask_input(inputs, x_at, used, step, steps, place, COLUMNS: gl.constexpr):
    """Start to copy the input tile of a step, if the step exists."""
    load(inputs.index(place), x_at + step * COLUMNS, mask=used & (step < steps))


@entry_kernel
@gluon.jit
def few_routed_tokens_hopper(
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
    BLOCK_N: gl.constexpr,
    COLUMNS: gl.constexpr,
    STAGES: gl.constexpr,
    LAG: gl.constexpr,
    ACTIVATION: gl.constexpr,
    BLOCKED: gl.constexpr,
    OVERLAP: gl.constexpr,
):
    """One block of ``TOKENS`` routed tokens by ``BLOCK_N`` weight rows; see :func:`multiply_few_routed_tokens`.

    With an activation, rows of ``x`` are tokens and rows of ``out`` are slots. Without, rows of ``x`` are slots, rows
    of ``out`` are routed tokens, and results are multiplied by the routing weight. ``STAGES - LAG`` tiles are copied
    ahead.
    """
    GATED: gl.constexpr = ACTIVATION is not None
    dtype: gl.constexpr = weight.dtype.element_ty
    warps: gl.constexpr = gl.num_warps()
    copied: gl.constexpr = gl.BlockedLayout([1, 8], [32 * 8 // COLUMNS, COLUMNS // 8], [warps, 1], [1, 0])
    summed: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, TOKENS, 16])
    of_rows: gl.constexpr = gl.SliceLayout(1, summed)
    ahead: gl.constexpr = STAGES - LAG
    if OVERLAP and GATED:
        depend("griddepcontrol.wait; // $0")
        # Not earlier: the second product reads the experts without waiting for this kernel.
        depend("griddepcontrol.launch_dependents; // $0")
    expert, routed_token = sorted_routed_tokens(block_experts, slots, TOKENS, gl.SliceLayout(1, copied))
    if expert < 0:
        # One program waits anyway, so that kernels that wait for this one also wait for those before it.
        if OVERLAP and not GATED and gl.program_id(0) + gl.program_id(1) == 0:
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
    at = weight + row_at(expert * N + row, K, BLOCKED)[:, None] + column[None, :]
    # In the blocked layout, the columns of this tile are those of one block.
    apart: gl.constexpr = COLUMNS * BLOCK_SIZE if BLOCKED else COLUMNS
    x_row = input_rows(routed_token, True, GATED, TOP_K, TOKENS, gl.SliceLayout(1, copied))
    used = (routed_token >= 0)[:, None]
    x_at = x + x_row.to(gl.int64)[:, None] * stride_x + column[None, :]
    steps = K // COLUMNS
    for stage in gl.static_range(ahead):
        _ask_weight(tiles, at, stage, steps, stage, apart)
        if GATED:
            _ask_input(inputs, x_at, used, stage, steps, stage, COLUMNS)
        async_copy.commit_group()
    if not GATED:
        if OVERLAP:
            depend("griddepcontrol.wait; // $0")
            depend("griddepcontrol.launch_dependents; // $0")
        for stage in gl.static_range(ahead):
            _ask_input(inputs, x_at, used, stage, steps, stage, COLUMNS)
            async_copy.commit_group()
    total = gl.zeros([BLOCK_N, TOKENS], gl.float32, summed)
    place = 0
    filled = ahead
    for step in range(steps):
        ready(ahead - 1)
        total = warpgroup_mma(tiles.index(place), inputs.index(place).permute((1, 0)), total, is_async=True)
        later = step + ahead
        _ask_weight(tiles, at, later, steps, filled, apart)
        _ask_input(inputs, x_at, used, later, steps, filled, COLUMNS)
        async_copy.commit_group()
        place = (place + 1) % STAGES
        filled = (filled + 1) % STAGES
        total = warpgroup_mma_wait(LAG - 1, [total])
    total = warpgroup_mma_wait(0, [total])
    all_copied()
    if bias is not None:
        of_sum = weight_rows(gl.arange(0, BLOCK_N, of_rows), N, BLOCK_N, GATED)
        total += gl.load(bias + expert * N + of_sum).to(gl.float32)[:, None]
    store_routed_tokens(
        total, routed_token, weights, out, gl.program_id(0), N, True, False, BLOCK_N, TOKENS, ACTIVATION
    )


@dataclass(frozen=True)
class Tile:
    """The tile of one program."""

    rows: int
    """Rows of the weight."""
    stages: int
    """Tiles that shared memory has room for."""
    warps: int


#: The fastest of some eight for 16 routed tokens; see docs/experiments.md.
_TILE = Tile(128, 4, 4)


def multiply_few_routed_tokens(
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
    """One product of blocks of routed tokens, into ``out``.

    Without an activation, ``blocks`` are read without waiting for the previous kernel, so they must be older than it.

    Args:
        x: ``[T, K]`` with an activation, else ``[slots, K]``.
        weights: float32 ``[T, k]`` without an activation.
        weight: ``[E, N, K]`` in the dtype of ``x``.
        bias: ``[E, N]``.
        out: ``[slots, N / 2]`` with an activation, else ``[T k, N]``.
        blocks: the routed tokens sorted by expert.
        top_k: experts per token.
        activation: a value of ``ACTIVATIONS``, or None.
        blocked: whether the weight is in the blocked layout of :mod:`atom_core.kernels.experts.blocked_layout`.
        overlap: see :func:`atom_core.kernels.triton_support.overlaps`.
    """
    _, out_features, in_features = weight.shape
    few_routed_tokens_hopper[cdiv(out_features, _TILE.rows), len(blocks.experts)](
        x,
        blocks.experts,
        blocks.slots,
        weights,
        weight,
        bias,
        out,
        in_features,
        out_features,
        x.stride(0),
        TOP_K=top_k,
        TOKENS=blocks.rows,
        BLOCK_N=_TILE.rows,
        COLUMNS=COLUMNS,
        STAGES=_TILE.stages,
        LAG=LAG,
        ACTIVATION=activation,
        BLOCKED=blocked,
        OVERLAP=overlap,
        num_warps=_TILE.warps,
        **launch_options(overlap),
    )
