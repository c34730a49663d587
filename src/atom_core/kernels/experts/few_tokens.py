"""Experts of few tokens, which are not sorted.

With one token, a program computes some rows of each expert. With several, a program belongs to one routed token: it
multiplies some weight rows of that expert by all tokens routed there, so each expert is read once; programs of later
routed tokens of the same expert exit. On Hopper the second product is :mod:`.few_tokens_hopper`.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from atom_core.kernels.eviction import EVICT_LAST
from atom_core.kernels.experts.blocked_layout import BLOCK_SIZE, column_at, row_at
from atom_core.kernels.experts.grouped import LocalExperts, combine, combine_key, finish_block
from atom_core.kernels.launch import entry_kernel
from atom_core.kernels.linear.helpers import finish, row_sums, row_total, weight_rows
from atom_core.kernels.linear.tiles import on_hopper, why_no_gluon
from atom_core.kernels.linear.triton_kernel import Norm
from atom_core.kernels.triton_support import cdiv, launch_options, next_power_of_2

if TYPE_CHECKING:
    from atom_core.kernels.experts import ExpertWeights

if why_no_gluon() is None:
    from atom_core.kernels.experts.few_tokens_hopper import down_of_few, down_of_few_key, takes_down_of_few

#: Largest number of tokens that are not sorted: a matrix product with 16 columns costs as much as with 8.
MAX_TOKENS = 16
#: Weight rows of a program with several tokens.
_ROWS = 64


@entry_kernel
@triton.jit
def _gate_up_of_one(
    x,
    norm,
    experts,
    weight,
    bias,
    intermediate,
    eps,
    FIRST: tl.constexpr,
    COUNT: tl.constexpr,
    K,
    N,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BLOCKED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """``intermediate [k, N / 2]``: some rows of one of the token's experts; ``norm``: RMS norm weight, or None."""
    stride: tl.constexpr = BLOCK_SIZE if BLOCKED else 1
    place = tl.program_id(1)
    row = weight_rows(N, BLOCK_N, True)
    column = tl.arange(0, BLOCK_K)
    known = tl.full([BLOCK_K], True, tl.int1) if EVEN else column < K
    factors = tl.load(norm + column, mask=known, other=0.0) if norm is not None else 0.0
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        # Not earlier: the next kernel reads the experts without waiting for this one.
        tl.extra.cuda.gdc_launch_dependents()
    expert = tl.load(experts + place) - FIRST
    if (expert < 0) | (expert >= COUNT):
        return
    weight += expert.to(tl.int64) * N * K
    if bias is not None:
        bias += expert.to(tl.int64) * N
    at = weight + row_at(row, K, BLOCKED)[:, None] + column_at(column, BLOCKED)[None, :]
    tile = tl.load(at, mask=known[None, :], other=0.0, eviction_policy="evict_first")
    sums, squares, tile, wide, factors = row_sums(at, x, norm, tile, factors, known, K, BLOCK_N, BLOCK_K, EVEN, stride)
    total = row_total(sums, squares, tile, wide, factors, norm, eps, K, BLOCK_N, BLOCK_K)
    intermediate += place.to(tl.int64) * (N // 2)
    finish(total[None, :], None, None, bias, None, intermediate, row, tl.arange(0, 1), 1, N, 1, BLOCK_N, ACTIVATION)


def parts_of_places(top_k: int) -> tuple[int, int]:
    """A token's experts as two tiles, of which the sizes are powers of 2: the largest that is full, and the rest or 0.

    One tile of 16 places for 9 experts, as those of Qwen3.5, would hold 7 that are empty in registers.
    """
    first = 1 << (top_k.bit_length() - 1)
    return first, next_power_of_2(top_k - first) if top_k > first else 0


@triton.jit
def experts_of_places(
    experts, FIRST: tl.constexpr, COUNT: tl.constexpr, TOP_K: tl.constexpr, BEGIN: tl.constexpr, PLACES: tl.constexpr
):
    """``PLACES`` of the token's places from ``BEGIN`` on, their experts counted from ``FIRST``, and which are local.

    The expert of a place that is not local is 0.
    """
    place = BEGIN + tl.arange(0, PLACES)
    # Written before the previous kernel started, but the L1 cache may have older values.
    expert = tl.load(experts + place, mask=place < TOP_K, other=FIRST - 1, cache_modifier=".cg") - FIRST
    local = (expert >= 0) & (expert < COUNT)
    return place, tl.where(local, expert, 0).to(tl.int64), local


@triton.jit
def _load_tile(weight, expert, local, row, column, begin, K, N, BLOCKED: tl.constexpr):
    """Columns from ``begin`` on of the same rows of each expert, ``[PLACES, BLOCK_N, BLOCK_K]``."""
    stride: tl.constexpr = BLOCK_SIZE if BLOCKED else 1
    at = weight + row_at(expert[:, None] * N + row[None, :], K, BLOCKED)[:, :, None]
    at += column_at(column, BLOCKED)[None, None, :] + begin * stride
    used = local[:, None, None] & (begin + column < K)[None, None, :]
    return tl.load(at, mask=used, other=0.0, eviction_policy="evict_first")


@triton.jit
def _load_input(intermediate, place, local, column, begin, K):
    at = intermediate + place.to(tl.int64)[:, None] * K + (begin + column)[None, :]
    return tl.load(at, mask=local[:, None] & (begin + column < K)[None, :], other=0.0).to(tl.float32)


@triton.jit
def _weighed(tile, wide, PLACES: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """``tile * wide`` for each expert, summed over the elements that one thread has."""
    numbers = tile.to(tl.float32) * wide[:, None, :]
    return tl.sum(tl.reshape(numbers, (PLACES, BLOCK_N, BLOCK_K // 8, 8)), 3)


@triton.jit
def _total(sums, weights, bias, place, expert, local, row, N):
    """The experts' outputs ``[BLOCK_N]``, each times its weight."""
    outputs = tl.sum(sums, 2)
    if bias is not None:
        outputs += tl.load(bias + expert[:, None] * N + row[None, :], mask=local[:, None], other=0.0).to(tl.float32)
    share = tl.load(weights + place, mask=local, other=0.0)
    return tl.sum(tl.where(local[:, None], outputs * share[:, None], 0.0), 0)


@entry_kernel
@triton.jit
def _down_of_one(
    intermediate,
    weights,
    experts,
    weight,
    bias,
    residual,
    y,
    FIRST: tl.constexpr,
    COUNT: tl.constexpr,
    TOP_K: tl.constexpr,
    PLACES: tl.constexpr,
    REST: tl.constexpr,
    K,
    N,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCKED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Some of ``y [1, N]``: the same rows of all the token's experts, in the parts of :func:`parts_of_places`."""
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
    row = weight_rows(N, BLOCK_N, False)
    column = tl.arange(0, BLOCK_K)
    place, expert, local = experts_of_places(experts, FIRST, COUNT, TOP_K, 0, PLACES)
    tile = _load_tile(weight, expert, local, row, column, 0, K, N, BLOCKED)
    if REST > 0:
        place_2, expert_2, local_2 = experts_of_places(experts, FIRST, COUNT, TOP_K, PLACES, REST)
        tile_2 = _load_tile(weight, expert_2, local_2, row, column, 0, K, N, BLOCKED)
        sums_2 = tl.zeros([REST, BLOCK_N, BLOCK_K // 8], tl.float32)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    wide = _load_input(intermediate, place, local, column, 0, K)
    if REST > 0:
        wide_2 = _load_input(intermediate, place_2, local_2, column, 0, K)
    sums = tl.zeros([PLACES, BLOCK_N, BLOCK_K // 8], tl.float32)
    for begin in tl.range(BLOCK_K, K, BLOCK_K):
        ahead = _load_tile(weight, expert, local, row, column, begin, K, N, BLOCKED)
        if REST > 0:
            ahead_2 = _load_tile(weight, expert_2, local_2, row, column, begin, K, N, BLOCKED)
        wide_ahead = _load_input(intermediate, place, local, column, begin, K)
        sums += _weighed(tile, wide, PLACES, BLOCK_N, BLOCK_K)
        tile = ahead
        wide = wide_ahead
        if REST > 0:
            wide_ahead_2 = _load_input(intermediate, place_2, local_2, column, begin, K)
            sums_2 += _weighed(tile_2, wide_2, REST, BLOCK_N, BLOCK_K)
            tile_2 = ahead_2
            wide_2 = wide_ahead_2
    sums += _weighed(tile, wide, PLACES, BLOCK_N, BLOCK_K)
    total = _total(sums, weights, bias, place, expert, local, row, N)
    if REST > 0:
        sums_2 += _weighed(tile_2, wide_2, REST, BLOCK_N, BLOCK_K)
        total += _total(sums_2, weights, bias, place_2, expert_2, local_2, row, N)
    out = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    if residual is not None:
        total += tl.load(residual + out, mask=out < N, other=0.0).to(tl.float32)
    tl.store(y + out, total.to(y.dtype.element_ty), mask=out < N, eviction_policy=EVICT_LAST)


@triton.jit
def tokens_of_expert(experts, T, FIRST: tl.constexpr, TOP_K: tl.constexpr, TOKENS: tl.constexpr, PLACES: tl.constexpr):
    """The expert of this program, counted from ``FIRST``; tokens; their routed tokens there; which are routed there.

    A program whose routed token is not the first of its expert has nothing to do. ``experts`` may have been written
    before the previous kernel started, so the load bypasses the L1 cache, which may have older values.
    """
    expert = tl.load(experts + tl.program_id(1), cache_modifier=".cg")
    token = tl.arange(0, TOKENS)
    place = tl.arange(0, PLACES)
    chosen = (token < T)[:, None] & (place < TOP_K)[None, :]
    at = experts + token[:, None] * TOP_K + place[None, :]
    others = tl.load(at, mask=chosen, other=FIRST - 1, cache_modifier=".cg")
    # A token is routed to an expert at most once.
    mine = tl.max(tl.where(chosen & (others == expert), place[None, :] + 1, 0), 1) - 1
    return expert - FIRST, token, token * TOP_K + mine, mine >= 0


@entry_kernel
@triton.jit(do_not_specialize=["T"])
def _of_expert(
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
    FIRST: tl.constexpr,
    COUNT: tl.constexpr,
    TOP_K: tl.constexpr,
    PLACES: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN: tl.constexpr,
    STAGES: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BLOCKED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Some weight rows of one expert by all tokens routed to it.

    With an activation, rows of ``x`` are tokens. Without, they are routed tokens, and results are multiplied by the
    routing weight. ``out`` has a row for each routed token.
    """
    GATED: tl.constexpr = ACTIVATION is not None
    stride: tl.constexpr = BLOCK_SIZE if BLOCKED else 1
    if OVERLAP and GATED:
        tl.extra.cuda.gdc_wait()
        # Not earlier: the second product reads the experts without waiting for this kernel.
        tl.extra.cuda.gdc_launch_dependents()
    expert, token, routed_tokens, goes = tokens_of_expert(experts, T, FIRST, TOP_K, TOKENS, PLACES)
    if OVERLAP and not GATED:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if (expert < 0) | (expert >= COUNT) | (tl.min(tl.where(goes, routed_tokens, TOKENS * TOP_K), 0) < tl.program_id(1)):
        return
    row = weight_rows(N, BLOCK_N, GATED)
    column = tl.arange(0, BLOCK_K)
    at = weight + row_at(expert.to(tl.int64) * N + row, K, BLOCKED)[:, None] + column_at(column, BLOCKED)[None, :]
    x_row = token if GATED else routed_tokens
    x_at = x + x_row.to(tl.int64)[None, :] * stride_x + column[:, None]
    total = tl.zeros([BLOCK_N, TOKENS], tl.float32)
    for begin in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        if EVEN:
            tile = tl.load(at + begin * stride, eviction_policy="evict_first")
            right = tl.load(x_at + begin, mask=goes[None, :], other=0.0)
        else:
            known = begin + column < K
            tile = tl.load(at + begin * stride, mask=known[None, :], other=0.0, eviction_policy="evict_first")
            right = tl.load(x_at + begin, mask=goes[None, :] & known[:, None], other=0.0)
        total = tl.dot(tile, right, total, input_precision="ieee")
    routed_tokens = routed_tokens.to(tl.int64)
    finish_block(
        tl.trans(total),
        weights,
        bias,
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


def _tile(tokens: int, gated: bool, wide: bool, hopper: bool) -> tuple[int, int]:
    """Columns of a program's tiles, and the number of tiles in flight.

    The Hopper values were measured on an H200 in steps of DeepSeek V2-Lite (intermediate size 1,408) and Qwen3 30B-A3B
    (768); other GPUs do not have enough shared memory for as many stages.
    """
    if wide:
        return 32, 2
    if not hopper:
        return 128, 3
    if gated:
        return 128, 3 if tokens <= 4 else 5
    return 64, 5  # where few_tokens_hopper does not support the operands


def one_token(
    x: torch.Tensor,
    weights: torch.Tensor,
    experts: torch.Tensor,
    layer: ExpertWeights,
    local_experts: LocalExperts,
    activation: int,
    overlap: bool,
    residual: torch.Tensor | None,
    norm: Norm | None = None,
) -> torch.Tensor:
    """Run one token; see :mod:`atom_core.kernels.experts`.

    ``activation``: a value of ``ACTIVATIONS``; ``residual``: contiguous, of the result's shape, written to and
    returned; ``norm``: the RMS norm to apply to ``x`` first, where ``x`` may be the residual.
    """
    hidden, size = x.shape[1], layer.down.shape[2]
    y = torch.empty_like(x, memory_format=torch.contiguous_format) if residual is None else residual
    intermediate = torch.empty(local_experts.top_k, size, dtype=x.dtype, device=x.device)
    first, count = local_experts.first, local_experts.count
    constants = {"FIRST": first, "COUNT": count, "BLOCKED": layer.blocked, "OVERLAP": overlap}
    columns = min(1024, next_power_of_2(hidden))
    _gate_up_of_one[(cdiv(size, 2), local_experts.top_k)](
        x,
        None if norm is None else norm.weight,
        experts,
        layer.gate_up,
        layer.gate_up_bias,
        intermediate,
        0.0 if norm is None else norm.eps,
        K=hidden,
        N=2 * size,
        BLOCK_N=4,
        BLOCK_K=columns,
        EVEN=hidden % columns == 0,
        ACTIVATION=activation,
        num_warps=2,
        **constants,
        **launch_options(overlap),
    )
    places, rest = parts_of_places(local_experts.top_k)
    # On an H200 the wider tile makes DeepSeek V2-Lite (intermediate size 1,408) 3% faster, Qwen3 30B-A3B (768) 3%
    # slower. In the blocked layout, half the columns of twice the rows make V2-Lite 0.8 to 0.9% faster on an H100.
    # Two parts of the places gain from twice the rows: 9 and 11 experts of 512 take 19.2 and 24.1 us a layer in place
    # of 21.2 and 25.8, with all products.
    deep = size >= 1024
    rows, columns = 8 if rest else 4, 512 if deep else min(256, max(16, next_power_of_2(size)))
    if deep and layer.blocked:
        rows, columns = 8, 256
    _down_of_one[(cdiv(hidden, rows),)](
        intermediate,
        weights,
        experts,
        layer.down,
        layer.down_bias,
        residual,
        y,
        TOP_K=local_experts.top_k,
        PLACES=places,
        REST=rest,
        K=size,
        N=hidden,
        BLOCK_N=rows,
        BLOCK_K=columns,
        num_warps=8 if deep else 4,
        **constants,
        **launch_options(overlap),
    )
    return y


def few_tokens_keys(tokens: int, local_experts: LocalExperts, wide: bool, hopper: bool) -> Iterator[Hashable]:
    """What :func:`few_tokens` is compiled for; see :mod:`atom_core.kernels.compile_keys`."""
    yield _tile(tokens, True, wide, hopper), _tile(tokens, False, wide, hopper)
    if hopper:
        yield down_of_few_key(tokens * local_experts.top_k)
    yield combine_key(tokens)


def few_tokens(
    x: torch.Tensor,
    weights: torch.Tensor,
    experts: torch.Tensor,
    layer: ExpertWeights,
    local_experts: LocalExperts,
    activation: int,
    overlap: bool,
    residual: torch.Tensor | None,
) -> torch.Tensor:
    """As :func:`one_token`, for 2 to :data:`MAX_TOKENS` tokens."""
    tokens, hidden = x.shape
    size, num_routed_tokens, wide = layer.down.shape[2], experts.numel(), x.dtype == torch.float32
    hopper = on_hopper(x.device)
    constants = {
        "FIRST": local_experts.first,
        "COUNT": local_experts.count,
        "TOP_K": local_experts.top_k,
        "PLACES": next_power_of_2(local_experts.top_k),
        "TOKENS": MAX_TOKENS,
        "BLOCKED": layer.blocked,
        "OVERLAP": overlap,
    }
    intermediate = torch.empty(num_routed_tokens, size, dtype=x.dtype, device=x.device)
    outputs = torch.empty(num_routed_tokens, hidden, dtype=torch.float32, device=x.device)

    def multiply(
        given: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        out: torch.Tensor,
        shares: torch.Tensor | None,
        act: int | None,
    ) -> None:
        rows, columns = weight.shape[1:]
        block, stages = _tile(tokens, act is not None, wide, hopper)
        _of_expert[(cdiv(rows, _ROWS), num_routed_tokens)](
            given,
            experts,
            shares,
            weight,
            bias,
            out,
            tokens,
            columns,
            rows,
            given.stride(0),
            BLOCK_N=_ROWS,
            BLOCK_K=block,
            EVEN=columns % block == 0,
            STAGES=stages,
            ACTIVATION=act,
            num_warps=4,
            **constants,
            **launch_options(overlap),
        )

    multiply(x, layer.gate_up, layer.gate_up_bias, intermediate, None, activation)
    if hopper and takes_down_of_few(intermediate, layer.down, num_routed_tokens):
        down_of_few(intermediate, experts, weights, layer, outputs, local_experts, MAX_TOKENS, overlap)
    else:
        multiply(intermediate, layer.down, layer.down_bias, outputs, weights, None)
    return combine(outputs, experts, local_experts, x.dtype, overlap, residual)
