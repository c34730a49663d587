"""FP8 experts of few tokens, which are not sorted; as :mod:`atom_core.kernels.experts.few_tokens`.

A single token is not quantised and takes two launches; see :mod:`atom_core.kernels.fp8_linear.packed`. Several are
quantised by separate launches before gate/up and before down (unless the gate/up kernel also writes FP8). Tensor cores
multiply them, and each expert is read once for all its tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl

from atom_core.kernels.eviction import EVICT_LAST
from atom_core.kernels.experts.few_tokens import MAX_TOKENS, experts_of_places, parts_of_places, tokens_of_expert
from atom_core.kernels.experts.grouped import LocalExperts, combine, finish_block
from atom_core.kernels.fp8_block_linear.quantize import quantize_groups
from atom_core.kernels.fp8_linear.packed import (
    first_row,
    norm_pairs,
    packed_products_by_place,
    packed_row_sums,
    places_as_multiplied,
    scales_of_groups,
)
from atom_core.kernels.fp8_linear.quantize import unit_of
from atom_core.kernels.launch import entry_kernel
from atom_core.kernels.linear.helpers import finish, weight_rows
from atom_core.kernels.linear.tiles import on_hopper, why_no_gluon
from atom_core.kernels.linear.triton_kernel import Norm
from atom_core.kernels.triton_support import cdiv, launch_options, next_power_of_2

if TYPE_CHECKING:
    from atom_core.kernels.fp8_experts import Fp8ExpertWeights

if why_no_gluon() is None:
    from atom_core.kernels.fp8_experts.hopper import empty_fp8_out, multiply_few_routed_tokens, takes


@entry_kernel
@triton.jit
def _gate_up_of_one(
    x,
    norm,
    experts,
    weight,
    scales,
    intermediate,
    eps,
    stride_scales,
    FIRST: tl.constexpr,
    COUNT: tl.constexpr,
    K,
    N,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK: tl.constexpr,
    EVEN: tl.constexpr,
    ACTIVATION: tl.constexpr,
    UNIT: tl.constexpr,
    NATIVE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """``intermediate [k, N / 2]``: some rows of one of the token's experts; ``norm``: RMS norm weight, or None."""
    GROUPS: tl.constexpr = BLOCK_K // 16
    NORM: tl.constexpr = norm is not None
    dtype: tl.constexpr = x.dtype.element_ty
    fp8: tl.constexpr = weight.dtype.element_ty
    place = tl.program_id(1)
    row = weight_rows(N, BLOCK_N, True)
    four = tl.arange(0, BLOCK_K // 4)
    two = tl.arange(0, BLOCK_K // 2)
    known = tl.full([BLOCK_K // 4], True, tl.int1) if EVEN else four < K // 4
    known_two = tl.full([BLOCK_K // 2], True, tl.int1) if EVEN else two < K // 2
    x_at = x.to(tl.pointer_type(tl.int32)) + two
    norm_at = x_at
    packed_norm = 0
    if NORM:
        norm_at = norm_pairs(norm, two)
        packed_norm = tl.load(norm_at, mask=known_two, other=0)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        # Not earlier: the next kernel reads the experts without waiting for this one.
        tl.extra.cuda.gdc_launch_dependents()
    expert = tl.load(experts + place) - FIRST
    if (expert < 0) | (expert >= COUNT):
        return
    packed = tl.load(x_at, mask=known_two, other=0)
    weight += expert.to(tl.int64) * N * K
    scales += expert.to(tl.int64) * stride_scales
    at = (weight + row * K).to(tl.pointer_type(tl.int32))[:, None] + four[None, :]
    scale_at = scales
    up_scale_at = scales
    if BLOCK > 0:
        scale_at = scales + first_row(BLOCK_N, True) // BLOCK * tl.cdiv(K, BLOCK)
        up_scale_at = scales + (first_row(BLOCK_N, True) + N // 2) // BLOCK * tl.cdiv(K, BLOCK)
    tile = tl.load(at, mask=known[None, :], other=0, eviction_policy="evict_first")
    mine = scales_of_groups(scale_at, 0, K, GROUPS, BLOCK)
    up_scales = scales_of_groups(up_scale_at, 0, K, GROUPS, BLOCK)
    sums, squares = packed_row_sums(
        at,
        scale_at,
        up_scale_at,
        x_at,
        norm_at,
        tile,
        mine,
        up_scales,
        packed,
        packed_norm,
        K,
        NORM,
        True,
        BLOCK_N,
        BLOCK_K,
        BLOCK,
        EVEN,
        NATIVE,
        dtype,
        fp8,
    )
    total = tl.sum(sums, 1) * UNIT
    if NORM:
        total *= 1.0 / tl.sqrt(tl.sum(squares, 0) / K + eps)
    intermediate += place.to(tl.int64) * (N // 2)
    # Row scales belong to whole rows; block scales have been applied.
    of_rows = scales if BLOCK == 0 else None
    finish(total[None, :], None, of_rows, None, None, intermediate, row, tl.arange(0, 1), 1, N, 1, BLOCK_N, ACTIVATION)


@triton.jit
def _weighed(
    tile,
    scales,
    packed,
    PLACES: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK: tl.constexpr,
    NATIVE: tl.constexpr,
    dtype: tl.constexpr,
    fp8: tl.constexpr,
):
    """A tile of each expert times its input, in groups of 16 columns, ``[PLACES, BLOCK_N, GROUPS]``."""
    x_packed, each = places_as_multiplied(packed, PLACES, GROUPS, dtype)
    if BLOCK > 0:
        each *= scales
    return packed_products_by_place(tile, x_packed, PLACES, BLOCK_N, GROUPS, NATIVE, fp8) * each[:, None, :]


@triton.jit
def _load_tile(weight, expert, local, row, begin, K, N, BLOCK_K: tl.constexpr):
    """Columns from ``begin`` on of the same rows of each expert, ``[PLACES, BLOCK_N, BLOCK_K / 4]`` in fours."""
    four = begin // 4 + tl.arange(0, BLOCK_K // 4)
    rows = weight + (expert[:, None] * N + row[None, :]) * K
    at = rows.to(tl.pointer_type(tl.int32))[:, :, None] + four[None, None, :]
    used = local[:, None, None] & (four < K // 4)[None, None, :]
    return tl.load(at, mask=used, other=0, eviction_policy="evict_first")


@triton.jit
def _load_input(intermediate, place, local, begin, K, BLOCK_K: tl.constexpr):
    """``[PLACES, BLOCK_K / 2]`` in pairs."""
    two = begin // 2 + tl.arange(0, BLOCK_K // 2)
    at = (intermediate + place.to(tl.int64)[:, None] * K).to(tl.pointer_type(tl.int32)) + two[None, :]
    return tl.load(at, mask=local[:, None] & (two < K // 2)[None, :], other=0)


@triton.jit
def _scales_and_shares(
    scales,
    weights,
    place,
    expert,
    local,
    row,
    stride_scales,
    K,
    BLOCK_N: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Where each expert's scales of these rows are, and what its outputs are multiplied by."""
    scale_at = scales + expert[:, None] * stride_scales
    share = tl.load(weights + place, mask=local, other=0.0, cache_modifier=".cg")[:, None]
    if BLOCK > 0:
        scale_at += first_row(BLOCK_N, False) // BLOCK * tl.cdiv(K, BLOCK)
    else:
        share *= tl.load(scale_at + row[None, :])
    return scale_at, share


@entry_kernel
@triton.jit
def _down_of_one(
    intermediate,
    weights,
    experts,
    weight,
    scales,
    residual,
    y,
    stride_scales,
    FIRST: tl.constexpr,
    COUNT: tl.constexpr,
    TOP_K: tl.constexpr,
    PLACES: tl.constexpr,
    REST: tl.constexpr,
    K,
    N,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK: tl.constexpr,
    UNIT: tl.constexpr,
    NATIVE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Some of ``y [1, N]``: the same rows of all the token's experts, in the parts of ``parts_of_places``."""
    GROUPS: tl.constexpr = BLOCK_K // 16
    dtype: tl.constexpr = intermediate.dtype.element_ty
    fp8: tl.constexpr = weight.dtype.element_ty
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
    row = weight_rows(N, BLOCK_N, False)
    place, expert, local = experts_of_places(experts, FIRST, COUNT, TOP_K, 0, PLACES)
    tile = _load_tile(weight, expert, local, row, 0, K, N, BLOCK_K)
    scale_at, share = _scales_and_shares(scales, weights, place, expert, local, row, stride_scales, K, BLOCK_N, BLOCK)
    mine = scales_of_groups(scale_at, 0, K, GROUPS, BLOCK)
    if REST > 0:
        place_2, expert_2, local_2 = experts_of_places(experts, FIRST, COUNT, TOP_K, PLACES, REST)
        tile_2 = _load_tile(weight, expert_2, local_2, row, 0, K, N, BLOCK_K)
        scale_at_2, share_2 = _scales_and_shares(
            scales, weights, place_2, expert_2, local_2, row, stride_scales, K, BLOCK_N, BLOCK
        )
        mine_2 = scales_of_groups(scale_at_2, 0, K, GROUPS, BLOCK)
        sums_2 = tl.zeros([REST, BLOCK_N, GROUPS], tl.float32)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    packed = _load_input(intermediate, place, local, 0, K, BLOCK_K)
    if REST > 0:
        packed_2 = _load_input(intermediate, place_2, local_2, 0, K, BLOCK_K)
    sums = tl.zeros([PLACES, BLOCK_N, GROUPS], tl.float32)
    for begin in tl.range(BLOCK_K, K, BLOCK_K):
        ahead = _load_tile(weight, expert, local, row, begin, K, N, BLOCK_K)
        if REST > 0:
            ahead_2 = _load_tile(weight, expert_2, local_2, row, begin, K, N, BLOCK_K)
        scales_ahead = scales_of_groups(scale_at, begin, K, GROUPS, BLOCK)
        packed_ahead = _load_input(intermediate, place, local, begin, K, BLOCK_K)
        sums += _weighed(tile, mine, packed, PLACES, BLOCK_N, GROUPS, BLOCK, NATIVE, dtype, fp8)
        tile = ahead
        mine = scales_ahead
        packed = packed_ahead
        if REST > 0:
            scales_ahead_2 = scales_of_groups(scale_at_2, begin, K, GROUPS, BLOCK)
            packed_ahead_2 = _load_input(intermediate, place_2, local_2, begin, K, BLOCK_K)
            sums_2 += _weighed(tile_2, mine_2, packed_2, REST, BLOCK_N, GROUPS, BLOCK, NATIVE, dtype, fp8)
            tile_2 = ahead_2
            mine_2 = scales_ahead_2
            packed_2 = packed_ahead_2
    sums += _weighed(tile, mine, packed, PLACES, BLOCK_N, GROUPS, BLOCK, NATIVE, dtype, fp8)
    total = tl.sum(tl.where(local[:, None], tl.sum(sums, 2) * share, 0.0), 0)
    if REST > 0:
        sums_2 += _weighed(tile_2, mine_2, packed_2, REST, BLOCK_N, GROUPS, BLOCK, NATIVE, dtype, fp8)
        total += tl.sum(tl.where(local_2[:, None], tl.sum(sums_2, 2) * share_2, 0.0), 0)
    total *= UNIT
    out = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    if residual is not None:
        total += tl.load(residual + out, mask=out < N, other=0.0).to(tl.float32)
    tl.store(y + out, total.to(y.dtype.element_ty), mask=out < N, eviction_policy=EVICT_LAST)


@entry_kernel
@triton.jit(do_not_specialize=["T", "stride_x_scales"])
def _of_expert(
    x,
    x_scales,
    experts,
    weights,
    weight,
    scales,
    out,
    T,
    K,
    N,
    stride_x_scales,
    stride_scales,
    FIRST: tl.constexpr,
    COUNT: tl.constexpr,
    TOP_K: tl.constexpr,
    PLACES: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK: tl.constexpr,
    EVEN: tl.constexpr,
    STAGES: tl.constexpr,
    ACTIVATION: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Some weight rows of one expert by all tokens routed to it.

    With an activation, rows of ``x`` are tokens. Without, they are routed tokens, and results are multiplied by the
    routing weight. ``out`` has a row for each routed token.
    """
    GATED: tl.constexpr = ACTIVATION is not None
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    expert, token, routed_tokens, goes = tokens_of_expert(experts, T, FIRST, TOP_K, TOKENS, PLACES)
    if (expert < 0) | (expert >= COUNT) | (tl.min(tl.where(goes, routed_tokens, TOKENS * TOP_K), 0) < tl.program_id(1)):
        return
    row = weight_rows(N, BLOCK_N, GATED)
    column = tl.arange(0, BLOCK_K)
    at = weight + (expert.to(tl.int64) * N + row)[:, None] * K + column[None, :]
    x_row = token if GATED else routed_tokens
    x_at = x + x_row.to(tl.int64)[None, :] * K + column[:, None]
    scales += expert.to(tl.int64) * stride_scales
    theirs_at = x_scales + x_row
    mine_at = scales + row
    if BLOCK > 0:
        mine_at = scales + row // BLOCK * tl.cdiv(K, BLOCK)
    # The scales of rows, or of a tile's blocks; the next ones are loaded before these are used.
    theirs = tl.load(theirs_at, mask=goes, other=0.0)
    ours = tl.load(mine_at)
    total = tl.zeros([BLOCK_N, TOKENS], tl.float32)
    for begin in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        if EVEN:
            tile = tl.load(at + begin, eviction_policy="evict_first")
            right = tl.load(x_at + begin, mask=goes[None, :], other=0.0)
        else:
            known = begin + column < K
            tile = tl.load(at + begin, mask=known[None, :], other=0.0, eviction_policy="evict_first")
            right = tl.load(x_at + begin, mask=goes[None, :] & known[:, None], other=0.0)
        if BLOCK > 0:
            tl.static_assert(BLOCK == BLOCK_K)
            group = begin // BLOCK + 1
            more = tl.full([TOKENS], K, tl.int32) > group * BLOCK
            theirs_ahead = tl.load(theirs_at + group * stride_x_scales, mask=goes & more, other=0.0)
            more = tl.full([BLOCK_N], K, tl.int32) > group * BLOCK
            ours_ahead = tl.load(mine_at + group, mask=more, other=0.0)
            total += tl.dot(tile, right) * ours[:, None] * theirs[None, :]
            theirs = theirs_ahead
            ours = ours_ahead
        else:
            total = tl.dot(tile, right, total)
    if BLOCK == 0:
        total *= ours[:, None] * theirs[None, :]
    routed_tokens = routed_tokens.to(tl.int64)
    finish_block(
        tl.trans(total),
        weights,
        None,
        out,
        expert.to(tl.int64),
        routed_tokens,
        routed_tokens,
        goes,
        row,
        N,
        TOKENS,
        BLOCK_N,
        ACTIVATION,
    )


def takes_one_token(hidden_size: int, intermediate_size: int, dtype: torch.dtype) -> bool:
    """Whether :func:`one_token` supports these sizes: it reads two inputs and sixteen weights at a time."""
    sizes = (hidden_size, intermediate_size)
    return dtype.itemsize == 2 and all(size % 16 == 0 for size in sizes)


def _constants(
    weight: torch.Tensor, local_experts: LocalExperts, block: int, nvidia: bool, overlap: bool
) -> dict[str, Any]:
    """Arguments of both launches of one token."""
    return {
        "FIRST": local_experts.first,
        "COUNT": local_experts.count,
        "BLOCK": block,
        "UNIT": unit_of(weight.dtype),
        # Triton's interpreter runs no inline assembly.
        "NATIVE": nvidia and not triton.knobs.runtime.interpret,
        "OVERLAP": overlap,
        **launch_options(overlap),
    }


def gate_up_of_one(
    x: torch.Tensor,
    experts: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    local_experts: LocalExperts,
    *,
    block: int,
    activation: int,
    nvidia: bool,
    overlap: bool,
    norm: Norm | None = None,
) -> torch.Tensor:
    """``act(gate x) * (up x)`` for one token that :func:`takes_one_token`, and each of its experts.

    Args:
        x: ``[1, H]``, aligned to 4 bytes.
        experts: int32 ``[1, k]``.
        weight: ``[E, 2I, H]`` in the device's variant of e4m3.
        scales: for e4m3fn values; see :mod:`atom_core.kernels.fp8_experts`.
        local_experts: the local experts.
        block: size of the square blocks that share a scale; 0: one scale per row.
        activation: a value of ``ACTIVATIONS``.
        nvidia: whether the device is NVIDIA's, with an instruction that converts e4m3 to float16.
        overlap: see :func:`atom_core.kernels.triton_support.overlaps`.
        norm: the RMS norm to apply to ``x`` first.

    Returns:
        ``[k, I]``; rows of experts that are not local are undefined.
    """
    _, rows, hidden = weight.shape
    intermediate = torch.empty(local_experts.top_k, rows // 2, dtype=x.dtype, device=x.device)
    columns, tile_rows = min(512, max(128, next_power_of_2(hidden))), 32
    _gate_up_of_one[(cdiv(rows, tile_rows), local_experts.top_k)](
        x,
        None if norm is None else norm.weight,
        experts,
        weight,
        scales,
        intermediate,
        0.0 if norm is None else norm.eps,
        scales[0].numel(),
        K=hidden,
        N=rows,
        BLOCK_N=tile_rows,
        BLOCK_K=columns,
        EVEN=hidden % columns == 0,
        ACTIVATION=activation,
        num_warps=4,
        **_constants(weight, local_experts, block, nvidia, overlap),
    )
    return intermediate


def down_of_one(
    intermediate: torch.Tensor,
    weights: torch.Tensor,
    experts: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    local_experts: LocalExperts,
    *,
    block: int,
    nvidia: bool,
    overlap: bool,
    residual: torch.Tensor | None,
) -> torch.Tensor:
    """The weighted sum of the down products of ``intermediate [k, I]`` over the token's experts, ``[1, H]``.

    ``weights``: float32 ``[1, k]``; ``weight``: ``[E, H, I]``; ``residual``: contiguous, of the result's shape; it is
    added to and returned; else as :func:`gate_up_of_one`.
    """
    _, hidden, size = weight.shape
    y = intermediate.new_empty(1, hidden) if residual is None else residual
    columns, tile_rows = min(256, max(128, next_power_of_2(size))), 8
    places, rest = parts_of_places(local_experts.top_k)
    _down_of_one[(cdiv(hidden, tile_rows),)](
        intermediate,
        weights,
        experts,
        weight,
        scales,
        residual,
        y,
        scales[0].numel(),
        TOP_K=local_experts.top_k,
        PLACES=places,
        REST=rest,
        K=size,
        N=hidden,
        BLOCK_N=tile_rows,
        BLOCK_K=columns,
        num_warps=4,
        **_constants(weight, local_experts, block, nvidia, overlap),
    )
    return y


def one_token(
    x: torch.Tensor,
    weights: torch.Tensor,
    experts: torch.Tensor,
    layer: Fp8ExpertWeights,
    local_experts: LocalExperts,
    *,
    block: int,
    activation: int,
    nvidia: bool,
    overlap: bool,
    residual: torch.Tensor | None,
    norm: Norm | None = None,
) -> torch.Tensor:
    """Run one token; see :mod:`atom_core.kernels.fp8_experts`; with ``norm``, ``x`` may be the residual."""
    way: dict[str, Any] = {"block": block, "nvidia": nvidia, "overlap": overlap}
    intermediate = gate_up_of_one(
        x, experts, layer.gate_up, layer.gate_up_scale, local_experts, activation=activation, norm=norm, **way
    )
    return down_of_one(
        intermediate, weights, experts, layer.down, layer.down_scale, local_experts, residual=residual, **way
    )


def multiply_of_experts(
    x: torch.Tensor,
    x_scales: torch.Tensor,
    experts: torch.Tensor,
    weights: torch.Tensor | None,
    weight: torch.Tensor,
    scales: torch.Tensor,
    out: torch.Tensor,
    local_experts: LocalExperts,
    *,
    block: int,
    activation: int | None,
    nvidia: bool,
    overlap: bool,
) -> None:
    """One product of the experts of 1 to :data:`MAX_TOKENS` tokens, into ``out``.

    Args:
        x: in a variant of e4m3, ``[T, K]`` with an activation, else ``[T k, K]``.
        x_scales: float32 ``[groups, rows of x]``, as :func:`quantize_groups` returns them.
        experts: int32 ``[T, k]``.
        weights: float32 ``[T, k]`` without an activation.
        weight: ``[E, N, K]`` in the same variant.
        scales: see :mod:`atom_core.kernels.fp8_experts`.
        out: ``[T k, N / 2]`` with an activation, else ``[T k, N]``; rows of experts that are not local are not written.
        local_experts: the local experts.
        block: size of the square blocks that share a scale; 0: one scale per row.
        activation: a value of ``ACTIVATIONS``, or None.
        nvidia: whether the device is NVIDIA's; others have less shared memory.
        overlap: see :func:`atom_core.kernels.triton_support.overlaps`.
    """
    (tokens, top_k), (_, rows, size) = experts.shape, weight.shape
    assert 0 < tokens <= MAX_TOKENS
    columns, tile_rows = block or 128, 64 if nvidia else 32
    _of_expert[(cdiv(rows, tile_rows), tokens * top_k)](
        x,
        x_scales,
        experts,
        weights,
        weight,
        scales,
        out,
        tokens,
        size,
        rows,
        len(x),
        scales[0].numel(),
        FIRST=local_experts.first,
        COUNT=local_experts.count,
        TOP_K=top_k,
        PLACES=next_power_of_2(top_k),
        TOKENS=MAX_TOKENS,
        BLOCK_N=tile_rows,
        BLOCK_K=columns,
        BLOCK=block,
        EVEN=size % columns == 0,
        # FP8 tiles are small, so many stages fit.
        STAGES=6 if nvidia else 2,
        ACTIVATION=activation,
        OVERLAP=overlap,
        num_warps=4,
        **launch_options(overlap),
    )


def few_tokens(
    x: torch.Tensor,
    weights: torch.Tensor,
    experts: torch.Tensor,
    layer: Fp8ExpertWeights,
    local_experts: LocalExperts,
    *,
    block: int,
    activation: int,
    nvidia: bool,
    overlap: bool,
    residual: torch.Tensor | None,
) -> torch.Tensor:
    """As :func:`one_token`, for 1 to :data:`MAX_TOKENS` tokens of any size and dtype."""
    hidden, size, num_routed_tokens, dtype = x.shape[1], layer.down.shape[2], experts.numel(), layer.gate_up.dtype
    intermediate = torch.empty(num_routed_tokens, size, dtype=x.dtype, device=x.device)
    outputs = torch.empty(num_routed_tokens, hidden, dtype=torch.float32, device=x.device)
    ready = None
    for given, weight, scales, out, shares, act in (
        (x, layer.gate_up, layer.gate_up_scale, intermediate, None, activation),
        (intermediate, layer.down, layer.down_scale, outputs, weights, None),
    ):
        hopper = on_hopper(x.device) and takes(weight, MAX_TOKENS, block, act is not None)
        fp8_out = empty_fp8_out(out, num_routed_tokens, dtype) if hopper and block and act is not None else None
        if ready is None:
            arrivals = None if fp8_out is None else fp8_out.arrivals
            ready = quantize_groups(given, dtype, overlap, group=block or None, late=hopper, cleared=arrivals)
        way: dict[str, Any] = {"block": block, "activation": act, "overlap": overlap}
        if hopper:
            multiply_few_routed_tokens(
                *ready, experts, None, shares, weight, scales, out, local_experts, fp8_out=fp8_out, **way
            )
        else:
            multiply_of_experts(*ready, experts, shares, weight, scales, out, local_experts, nvidia=nvidia, **way)
        ready = None if fp8_out is None else fp8_out.quantized
    return combine(outputs, experts, local_experts, x.dtype, overlap, residual)
