"""FP8 experts of few tokens, without sorting them; as :mod:`atom_core.kernels.experts.few_tokens`.

One token is not quantised, and multiplied as :mod:`atom_core.kernels.fp8_linear.words` says: two launches. Several are
quantised in launches of their own, in front of gate and up and, unless those leave it in FP8, of down, and multiplied
by tensor cores: each expert is read once for all tokens that go there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl

from atom_core.kernels.eviction import EVICT_LAST
from atom_core.kernels.experts.few_tokens import MAX_TOKENS, tokens_of_expert
from atom_core.kernels.experts.grouped import Held, combine, finish_block
from atom_core.kernels.fp8_block_linear.quantize import quantize_groups
from atom_core.kernels.fp8_linear.quantize import unit_of
from atom_core.kernels.fp8_linear.words import (
    first_row,
    places_as_multiplied,
    products_of_places,
    row_sums_of_words,
    scales_of_groups,
)
from atom_core.kernels.linear.parts import finish, weight_rows
from atom_core.kernels.linear.tiles import on_hopper, why_no_gluon
from atom_core.kernels.linear.triton_kernel import Norm
from atom_core.kernels.triton_support import launch_options

if TYPE_CHECKING:
    from atom_core.kernels.fp8_experts import Fp8ExpertWeights

if why_no_gluon() is None:
    from atom_core.kernels.fp8_experts.hopper import multiply_few_pairs, room_to_leave, takes


@triton.jit
def _gate_up_of_one(
    x,
    norm,
    experts,
    weight,
    scales,
    middle,
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
    """``middle [k, N / 2]``: a program takes some rows for one of the token's experts, behind a norm or not."""
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
    norm_words = 0
    if NORM:
        norm_at = norm.to(tl.pointer_type(tl.int32)) + two
        norm_words = tl.load(norm_at, mask=known_two, other=0)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        # Not earlier: the kernel behind reads which experts they are without waiting for this one.
        tl.extra.cuda.gdc_launch_dependents()
    expert = tl.load(experts + place) - FIRST
    if (expert < 0) | (expert >= COUNT):
        return
    words = tl.load(x_at, mask=known_two, other=0)
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
    sums, squares = row_sums_of_words(
        at,
        scale_at,
        up_scale_at,
        x_at,
        norm_at,
        tile,
        mine,
        up_scales,
        words,
        norm_words,
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
    middle += place.to(tl.int64) * (N // 2)
    # Rows' scales are of the whole weight of an expert, blocks' have been multiplied.
    of_rows = scales if BLOCK == 0 else None
    finish(total[None, :], None, of_rows, None, None, middle, row, tl.arange(0, 1), 1, N, 1, BLOCK_N, ACTIVATION)


@triton.jit
def _weighed(
    tile,
    scales,
    words,
    PLACES: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK: tl.constexpr,
    NATIVE: tl.constexpr,
    dtype: tl.constexpr,
    fp8: tl.constexpr,
):
    """A tile of each expert by what it meets of its row, ``[PLACES, BLOCK_N, GROUPS]``."""
    pairs, each = places_as_multiplied(words, PLACES, GROUPS, dtype)
    if BLOCK > 0:
        each *= scales
    return products_of_places(tile, pairs, PLACES, BLOCK_N, GROUPS, NATIVE, fp8) * each[:, None, :]


@triton.jit
def _down_of_one(
    middle,
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
    K,
    N,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK: tl.constexpr,
    UNIT: tl.constexpr,
    NATIVE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Some of ``y [1, N]``: the rows of all of the token's experts at once."""
    GROUPS: tl.constexpr = BLOCK_K // 16
    dtype: tl.constexpr = middle.dtype.element_ty
    fp8: tl.constexpr = weight.dtype.element_ty
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
    row = weight_rows(N, BLOCK_N, False)
    four = tl.arange(0, BLOCK_K // 4)
    two = tl.arange(0, BLOCK_K // 2)
    place = tl.arange(0, PLACES)
    # Chosen before the kernel in front began; its first-level cache may still have what was there before.
    expert = tl.load(experts + place, mask=place < TOP_K, other=FIRST - 1, cache_modifier=".cg") - FIRST
    held = (expert >= 0) & (expert < COUNT)
    expert = tl.where(held, expert, 0).to(tl.int64)
    rows = weight + (expert[:, None] * N + row[None, :]) * K
    at = rows.to(tl.pointer_type(tl.int32))[:, :, None] + four[None, None, :]
    scale_at = scales + expert[:, None] * stride_scales
    if BLOCK > 0:
        scale_at += first_row(BLOCK_N, False) // BLOCK * tl.cdiv(K, BLOCK)
    numbers = middle + place.to(tl.int64)[:, None] * K
    x_at = numbers.to(tl.pointer_type(tl.int32)) + two[None, :]
    used = held[:, None, None]
    tile = tl.load(at, mask=used & (four < K // 4)[None, None, :], other=0, eviction_policy="evict_first")
    mine = scales_of_groups(scale_at, 0, K, GROUPS, BLOCK)
    share = tl.load(weights + place, mask=held, other=0.0, cache_modifier=".cg")
    if BLOCK == 0:
        share_of_rows = tl.load(scales + expert[:, None] * stride_scales + row[None, :]) * share[:, None]
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    words = tl.load(x_at, mask=held[:, None] & (two < K // 2)[None, :], other=0)
    sums = tl.zeros([PLACES, BLOCK_N, GROUPS], tl.float32)
    for begin in tl.range(BLOCK_K, K, BLOCK_K):
        known = used & (begin // 4 + four < K // 4)[None, None, :]
        ahead = tl.load(at + begin // 4, mask=known, other=0, eviction_policy="evict_first")
        scales_ahead = scales_of_groups(scale_at, begin, K, GROUPS, BLOCK)
        words_ahead = tl.load(x_at + begin // 2, mask=held[:, None] & (begin // 2 + two < K // 2)[None, :], other=0)
        sums += _weighed(tile, mine, words, PLACES, BLOCK_N, GROUPS, BLOCK, NATIVE, dtype, fp8)
        tile = ahead
        mine = scales_ahead
        words = words_ahead
    sums += _weighed(tile, mine, words, PLACES, BLOCK_N, GROUPS, BLOCK, NATIVE, dtype, fp8)
    answers = tl.sum(sums, 2)
    if BLOCK == 0:
        answers *= share_of_rows
    else:
        answers *= share[:, None]
    total = tl.sum(tl.where(held[:, None], answers, 0.0), 0) * UNIT
    out = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    if residual is not None:
        total += tl.load(residual + out, mask=out < N, other=0.0).to(tl.float32)
    tl.store(y + out, total.to(y.dtype.element_ty), mask=out < N, eviction_policy=EVICT_LAST)


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
    """Some rows of one expert's weight by all tokens that go there.

    With an activation rows of ``x`` are tokens; without they are pairs, and results are given their pair's weight.
    ``out``: a row a pair.
    """
    GATED: tl.constexpr = ACTIVATION is not None
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    expert, token, pairs, goes = tokens_of_expert(experts, T, FIRST, TOP_K, TOKENS, PLACES)
    if (expert < 0) | (expert >= COUNT) | (tl.min(tl.where(goes, pairs, TOKENS * TOP_K), 0) < tl.program_id(1)):
        return
    row = weight_rows(N, BLOCK_N, GATED)
    column = tl.arange(0, BLOCK_K)
    at = weight + (expert.to(tl.int64) * N + row)[:, None] * K + column[None, :]
    x_row = token if GATED else pairs
    x_at = x + x_row.to(tl.int64)[None, :] * K + column[:, None]
    scales += expert.to(tl.int64) * stride_scales
    theirs_at = x_scales + x_row
    mine_at = scales + row
    if BLOCK > 0:
        mine_at = scales + row // BLOCK * tl.cdiv(K, BLOCK)
    # Those of rows, or of a tile's blocks, each loaded before the last is used.
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
    pairs = pairs.to(tl.int64)
    finish_block(
        tl.trans(total),
        weights,
        None,
        out,
        expert.to(tl.int64),
        pairs,
        pairs,
        goes,
        row,
        N,
        TOKENS,
        BLOCK_N,
        ACTIVATION,
    )


def takes_one_token(hidden_size: int, intermediate_size: int, dtype: torch.dtype) -> bool:
    """Whether :func:`one_token` can be used: numbers are read two to a word, weights 16 at once."""
    sizes = (hidden_size, intermediate_size)
    return dtype.itemsize == 2 and all(size % 16 == 0 for size in sizes)


def _constants(weight: torch.Tensor, held: Held, block: int, nvidia: bool, overlap: bool) -> dict[str, Any]:
    """What both launches of one token are given."""
    return {
        "FIRST": held.first,
        "COUNT": held.count,
        "BLOCK": block,
        "UNIT": unit_of(weight.dtype),
        # Triton's interpreter runs no assembly.
        "NATIVE": nvidia and not triton.knobs.runtime.interpret,
        "OVERLAP": overlap,
        **launch_options(overlap),
    }


def gate_up_of_one(
    x: torch.Tensor,
    experts: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    held: Held,
    *,
    block: int,
    activation: int,
    nvidia: bool,
    overlap: bool,
    norm: Norm | None = None,
) -> torch.Tensor:
    """``act(gate x) * (up x)`` of one token for which :func:`takes_one_token`, and each of its experts.

    Args:
        x: ``[1, H]``, which begins with a word.
        experts: int32 ``[1, k]``.
        weight: ``[E, 2I, H]`` in the device's form of e4m3.
        scales: of e4m3fn's numbers; see :mod:`atom_core.kernels.fp8_experts`.
        held: this rank's experts.
        block: rows and columns that have one scale; 0: each row has one.
        activation: one of ``ACTIVATIONS``' numbers.
        nvidia: the device is one of NVIDIA's, with an instruction that widens e4m3 to float16.
        overlap: see :func:`atom_core.kernels.triton_support.overlaps`.
        norm: norm ``x`` first.

    Returns:
        ``[k, I]``; what is there for experts that are not held means nothing.
    """
    _, rows, hidden = weight.shape
    middle = torch.empty(held.top_k, rows // 2, dtype=x.dtype, device=x.device)
    columns, tile_rows = min(512, max(128, triton.next_power_of_2(hidden))), 32
    _gate_up_of_one[(triton.cdiv(rows, tile_rows), held.top_k)](
        x,
        None if norm is None else norm.weight,
        experts,
        weight,
        scales,
        middle,
        0.0 if norm is None else norm.eps,
        scales[0].numel(),
        K=hidden,
        N=rows,
        BLOCK_N=tile_rows,
        BLOCK_K=columns,
        EVEN=hidden % columns == 0,
        ACTIVATION=activation,
        num_warps=4,
        **_constants(weight, held, block, nvidia, overlap),
    )
    return middle


def down_of_one(
    middle: torch.Tensor,
    weights: torch.Tensor,
    experts: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    held: Held,
    *,
    block: int,
    nvidia: bool,
    overlap: bool,
    residual: torch.Tensor | None,
) -> torch.Tensor:
    """``[1, H]``, the weighted sum of down ``middle [k, I]`` over the token's experts, and the residual.

    ``weights``: float32 ``[1, k]``; ``weight``: ``[E, H, I]``; ``residual``: contiguous, in the result's shape; it is
    written to, and is the result; else as :func:`gate_up_of_one`.
    """
    _, hidden, size = weight.shape
    y = middle.new_empty(1, hidden) if residual is None else residual
    columns, tile_rows = min(256, max(128, triton.next_power_of_2(size))), 8
    _down_of_one[(triton.cdiv(hidden, tile_rows),)](
        middle,
        weights,
        experts,
        weight,
        scales,
        residual,
        y,
        scales[0].numel(),
        TOP_K=held.top_k,
        PLACES=triton.next_power_of_2(held.top_k),
        K=size,
        N=hidden,
        BLOCK_N=tile_rows,
        BLOCK_K=columns,
        num_warps=4,
        **_constants(weight, held, block, nvidia, overlap),
    )
    return y


def one_token(
    x: torch.Tensor,
    weights: torch.Tensor,
    experts: torch.Tensor,
    layer: Fp8ExpertWeights,
    held: Held,
    *,
    block: int,
    activation: int,
    nvidia: bool,
    overlap: bool,
    residual: torch.Tensor | None,
    norm: Norm | None = None,
) -> torch.Tensor:
    """See :mod:`atom_core.kernels.fp8_experts`; of one token, which may be normed first and be the residual."""
    way: dict[str, Any] = {"block": block, "nvidia": nvidia, "overlap": overlap}
    middle = gate_up_of_one(
        x, experts, layer.gate_up, layer.gate_up_scale, held, activation=activation, norm=norm, **way
    )
    return down_of_one(middle, weights, experts, layer.down, layer.down_scale, held, residual=residual, **way)


def multiply_of_experts(
    x: torch.Tensor,
    x_scales: torch.Tensor,
    experts: torch.Tensor,
    weights: torch.Tensor | None,
    weight: torch.Tensor,
    scales: torch.Tensor,
    out: torch.Tensor,
    held: Held,
    *,
    block: int,
    activation: int | None,
    nvidia: bool,
    overlap: bool,
) -> None:
    """One product of the experts that some of 1 to :data:`MAX_TOKENS` tokens go to, into ``out``.

    Args:
        x: in a form of e4m3, ``[T, K]`` with an activation, else ``[T k, K]``.
        x_scales: float32 ``[groups, rows of x]``, as :func:`quantize_groups` has them.
        experts: int32 ``[T, k]``.
        weights: float32 ``[T, k]`` without an activation.
        weight: ``[E, N, K]`` in the same form.
        scales: see :mod:`atom_core.kernels.fp8_experts`.
        out: ``[T k, N / 2]`` with an activation, else ``[T k, N]``; rows of experts not held are left as they are.
        held: this rank's experts.
        block: rows and columns that have one scale; 0: each row has one.
        activation: one of ``ACTIVATIONS``' numbers, or None.
        nvidia: whether the device is one of NVIDIA's; others have less shared memory.
        overlap: see :func:`atom_core.kernels.triton_support.overlaps`.
    """
    (tokens, top_k), (_, rows, size) = experts.shape, weight.shape
    assert 0 < tokens <= MAX_TOKENS
    columns, tile_rows = block or 128, 64 if nvidia else 32
    _of_expert[(triton.cdiv(rows, tile_rows), tokens * top_k)](
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
        FIRST=held.first,
        COUNT=held.count,
        TOP_K=top_k,
        PLACES=triton.next_power_of_2(top_k),
        TOKENS=MAX_TOKENS,
        BLOCK_N=tile_rows,
        BLOCK_K=columns,
        BLOCK=block,
        EVEN=size % columns == 0,
        # Tiles of the weight on their way: one of FP8 is small.
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
    held: Held,
    *,
    block: int,
    activation: int,
    nvidia: bool,
    overlap: bool,
    residual: torch.Tensor | None,
) -> torch.Tensor:
    """As :func:`one_token`, of 1 to :data:`MAX_TOKENS` of any size and dtype."""
    hidden, size, pairs, dtype = x.shape[1], layer.down.shape[2], experts.numel(), layer.gate_up.dtype
    middle = torch.empty(pairs, size, dtype=x.dtype, device=x.device)
    answers = torch.empty(pairs, hidden, dtype=torch.float32, device=x.device)
    ready = None
    for given, weight, scales, out, shares, act in (
        (x, layer.gate_up, layer.gate_up_scale, middle, None, activation),
        (middle, layer.down, layer.down_scale, answers, weights, None),
    ):
        hopper = on_hopper(x.device) and takes(weight, MAX_TOKENS, block, act is not None)
        left = room_to_leave(out, pairs, dtype) if hopper and block and act is not None else None
        if ready is None:
            arrivals = None if left is None else left.arrivals
            ready = quantize_groups(given, dtype, overlap, group=block or None, late=hopper, cleared=arrivals)
        way: dict[str, Any] = {"block": block, "activation": act, "overlap": overlap}
        if hopper:
            multiply_few_pairs(*ready, experts, None, shares, weight, scales, out, held, left=left, **way)
        else:
            multiply_of_experts(*ready, experts, shares, weight, scales, out, held, nvidia=nvidia, **way)
        ready = None if left is None else left.quantized
    return combine(answers, experts, held, x.dtype, overlap, residual)
