"""Experts of few tokens, without sorting them.

One token: a program takes some rows of each expert's weight for it. Several: a program takes some rows of the weight of
one pair of a token and an expert, and multiplies all tokens that go there, so that each expert is read once; programs
of the expert's later pairs have nothing to do. On Hopper the second product is :mod:`.few_tokens_hopper`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from atom_core.kernels.eviction import EVICT_LAST
from atom_core.kernels.experts.grouped import Held, combine, finish_block
from atom_core.kernels.experts.tiled import FAR, column_at, row_at
from atom_core.kernels.linear.parts import finish, row_sums, row_total, weight_rows
from atom_core.kernels.linear.tiles import on_hopper, why_no_gluon
from atom_core.kernels.linear.triton_kernel import Norm
from atom_core.kernels.triton_support import launch_options

if TYPE_CHECKING:
    from atom_core.kernels.experts import ExpertWeights

if why_no_gluon() is None:
    from atom_core.kernels.experts.few_tokens_hopper import down_of_few, takes_down_of_few

#: Tokens up to which nothing is sorted: the columns of a matrix product that costs no more than half as many.
MAX_TOKENS = 16
#: Rows of an expert's weight that a program takes of several tokens' product.
_ROWS = 64


@triton.jit
def _gate_up_of_one(
    x,
    norm,
    experts,
    weight,
    bias,
    middle,
    eps,
    FIRST: tl.constexpr,
    COUNT: tl.constexpr,
    K,
    N,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN: tl.constexpr,
    ACTIVATION: tl.constexpr,
    TILED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """``middle [k, N / 2]``: a program takes some rows for one of the token's experts, behind a norm or not."""
    far: tl.constexpr = FAR if TILED else 1
    place = tl.program_id(1)
    row = weight_rows(N, BLOCK_N, True)
    column = tl.arange(0, BLOCK_K)
    known = tl.full([BLOCK_K], True, tl.int1) if EVEN else column < K
    factors = tl.load(norm + column, mask=known, other=0.0) if norm is not None else 0.0
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        # Not earlier: the kernel behind reads which experts they are without waiting for this one.
        tl.extra.cuda.gdc_launch_dependents()
    expert = tl.load(experts + place) - FIRST
    if (expert < 0) | (expert >= COUNT):
        return
    weight += expert.to(tl.int64) * N * K
    if bias is not None:
        bias += expert.to(tl.int64) * N
    at = weight + row_at(row, K, TILED)[:, None] + column_at(column, TILED)[None, :]
    tile = tl.load(at, mask=known[None, :], other=0.0, eviction_policy="evict_first")
    sums, squares, tile, wide, factors = row_sums(at, x, norm, tile, factors, known, K, BLOCK_N, BLOCK_K, EVEN, far)
    total = row_total(sums, squares, tile, wide, factors, norm, eps, K, BLOCK_N, BLOCK_K)
    middle += place.to(tl.int64) * (N // 2)
    finish(total[None, :], None, None, bias, None, middle, row, tl.arange(0, 1), 1, N, 1, BLOCK_N, ACTIVATION)


@triton.jit
def _weighed(tile, wide, PLACES: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """``tile * wide`` of each expert, summed up as far as one thread has the numbers."""
    numbers = tile.to(tl.float32) * wide[:, None, :]
    return tl.sum(tl.reshape(numbers, (PLACES, BLOCK_N, BLOCK_K // 8, 8)), 3)


@triton.jit
def _down_of_one(
    middle,
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
    K,
    N,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TILED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Some of ``y [1, N]``: the rows of all of the token's experts at once."""
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
    far: tl.constexpr = FAR if TILED else 1
    row = weight_rows(N, BLOCK_N, False)
    column = tl.arange(0, BLOCK_K)
    place = tl.arange(0, PLACES)
    # Chosen before the kernel in front began; its first-level cache may still have what was there before.
    expert = tl.load(experts + place, mask=place < TOP_K, other=FIRST - 1, cache_modifier=".cg") - FIRST
    held = (expert >= 0) & (expert < COUNT)
    expert = tl.where(held, expert, 0).to(tl.int64)
    at = weight + row_at(expert[:, None] * N + row[None, :], K, TILED)[:, :, None]
    at += column_at(column, TILED)[None, None, :]
    used = held[:, None, None]
    x_at = middle + place.to(tl.int64)[:, None] * K + column[None, :]
    tile = tl.load(at, mask=used & (column < K)[None, None, :], other=0.0, eviction_policy="evict_first")
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    wide = tl.load(x_at, mask=held[:, None] & (column < K)[None, :], other=0.0).to(tl.float32)
    sums = tl.zeros([PLACES, BLOCK_N, BLOCK_K // 8], tl.float32)
    for begin in tl.range(BLOCK_K, K, BLOCK_K):
        known = begin + column < K
        ahead = tl.load(at + begin * far, mask=used & known[None, None, :], other=0.0, eviction_policy="evict_first")
        wide_ahead = tl.load(x_at + begin, mask=held[:, None] & known[None, :], other=0.0).to(tl.float32)
        sums += _weighed(tile, wide, PLACES, BLOCK_N, BLOCK_K)
        tile = ahead
        wide = wide_ahead
    answers = tl.sum(sums + _weighed(tile, wide, PLACES, BLOCK_N, BLOCK_K), 2)
    if bias is not None:
        answers += tl.load(bias + expert[:, None] * N + row[None, :], mask=held[:, None], other=0.0).to(tl.float32)
    share = tl.load(weights + place, mask=held, other=0.0)
    total = tl.sum(tl.where(held[:, None], answers * share[:, None], 0.0), 0)
    out = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    if residual is not None:
        total += tl.load(residual + out, mask=out < N, other=0.0).to(tl.float32)
    tl.store(y + out, total.to(y.dtype.element_ty), mask=out < N, eviction_policy=EVICT_LAST)


@triton.jit
def tokens_of_expert(experts, T, FIRST: tl.constexpr, TOP_K: tl.constexpr, TOKENS: tl.constexpr, PLACES: tl.constexpr):
    """The expert of this program's pair, counted from ``FIRST``, and its tokens, each with its pair; who goes there.

    A program whose pair is not the first of ``pairs`` that go there has nothing to do. Read past the first-level cache,
    which may have what was there before: the choice may be older than the kernel in front.
    """
    expert = tl.load(experts + tl.program_id(1), cache_modifier=".cg")
    token = tl.arange(0, TOKENS)
    place = tl.arange(0, PLACES)
    chosen = (token < T)[:, None] & (place < TOP_K)[None, :]
    at = experts + token[:, None] * TOP_K + place[None, :]
    others = tl.load(at, mask=chosen, other=FIRST - 1, cache_modifier=".cg")
    # A token goes to an expert once.
    mine = tl.max(tl.where(chosen & (others == expert), place[None, :] + 1, 0), 1) - 1
    return expert - FIRST, token, token * TOP_K + mine, mine >= 0


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
    TILED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Some rows of one expert's weight by all tokens that go there.

    With an activation rows of ``x`` are tokens; without they are pairs, and results are given their pair's weight.
    ``out``: a row a pair.
    """
    GATED: tl.constexpr = ACTIVATION is not None
    far: tl.constexpr = FAR if TILED else 1
    if OVERLAP and GATED:
        tl.extra.cuda.gdc_wait()
        # Not earlier: the second product reads which experts they are without waiting for this one.
        tl.extra.cuda.gdc_launch_dependents()
    expert, token, pairs, goes = tokens_of_expert(experts, T, FIRST, TOP_K, TOKENS, PLACES)
    if OVERLAP and not GATED:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if (expert < 0) | (expert >= COUNT) | (tl.min(tl.where(goes, pairs, TOKENS * TOP_K), 0) < tl.program_id(1)):
        return
    row = weight_rows(N, BLOCK_N, GATED)
    column = tl.arange(0, BLOCK_K)
    at = weight + row_at(expert.to(tl.int64) * N + row, K, TILED)[:, None] + column_at(column, TILED)[None, :]
    x_row = token if GATED else pairs
    x_at = x + x_row.to(tl.int64)[None, :] * stride_x + column[:, None]
    total = tl.zeros([BLOCK_N, TOKENS], tl.float32)
    for begin in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        if EVEN:
            tile = tl.load(at + begin * far, eviction_policy="evict_first")
            right = tl.load(x_at + begin, mask=goes[None, :], other=0.0)
        else:
            known = begin + column < K
            tile = tl.load(at + begin * far, mask=known[None, :], other=0.0, eviction_policy="evict_first")
            right = tl.load(x_at + begin, mask=goes[None, :] & known[:, None], other=0.0)
        total = tl.dot(tile, right, total, input_precision="ieee")
    pairs = pairs.to(tl.int64)
    finish_block(
        tl.trans(total),
        weights,
        bias,
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


def _tile(tokens: int, gated: bool, wide: bool, hopper: bool) -> tuple[int, int]:
    """Columns of a program's tiles, and how many of them are on their way.

    On Hopper as measured on an H200 in steps of DeepSeek V2-Lite (a middle of 1,408) and Qwen3 30B-A3B (768); what is
    on its way there is more than other GPUs have shared memory for.
    """
    if wide:
        return 32, 2
    if not hopper:
        return 128, 3
    if gated:
        return 128, 3 if tokens <= 4 else 5
    return 64, 5  # where there is no kernel of Hopper's own


def one_token(
    x: torch.Tensor,
    weights: torch.Tensor,
    experts: torch.Tensor,
    layer: ExpertWeights,
    held: Held,
    activation: int,
    overlap: bool,
    residual: torch.Tensor | None,
    norm: Norm | None = None,
) -> torch.Tensor:
    """See :mod:`atom_core.kernels.experts`; ``activation`` is one of ``ACTIVATIONS``' numbers.

    ``residual``: contiguous, in the result's shape; it is written to, and is the result. ``norm``: norm ``x`` first; it
    may be the residual.
    """
    hidden, size = x.shape[1], layer.down.shape[2]
    y = torch.empty_like(x, memory_format=torch.contiguous_format) if residual is None else residual
    middle = torch.empty(held.top_k, size, dtype=x.dtype, device=x.device)
    constants = {"FIRST": held.first, "COUNT": held.count, "TILED": layer.tiled, "OVERLAP": overlap}
    columns = min(1024, triton.next_power_of_2(hidden))
    _gate_up_of_one[(triton.cdiv(size, 2), held.top_k)](
        x,
        None if norm is None else norm.weight,
        experts,
        layer.gate_up,
        layer.gate_up_bias,
        middle,
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
    # On an H200 the wider tile makes DeepSeek V2-Lite (a middle of 1,408) 3% faster, and Qwen3 30B-A3B (768) 3% slower;
    # where weights lie in tiles, half the columns of twice as many rows make V2-Lite 0.8 to 0.9% faster on an H100.
    deep = size >= 1024
    rows, columns = 4, 512 if deep else min(256, max(16, triton.next_power_of_2(size)))
    if deep and layer.tiled:
        rows, columns = 8, 256
    _down_of_one[(triton.cdiv(hidden, rows),)](
        middle,
        weights,
        experts,
        layer.down,
        layer.down_bias,
        residual,
        y,
        TOP_K=held.top_k,
        PLACES=triton.next_power_of_2(held.top_k),
        K=size,
        N=hidden,
        BLOCK_N=rows,
        BLOCK_K=columns,
        num_warps=8 if deep else 4,
        **constants,
        **launch_options(overlap),
    )
    return y


def few_tokens(
    x: torch.Tensor,
    weights: torch.Tensor,
    experts: torch.Tensor,
    layer: ExpertWeights,
    held: Held,
    activation: int,
    overlap: bool,
    residual: torch.Tensor | None,
) -> torch.Tensor:
    """As :func:`one_token`, of 2 to :data:`MAX_TOKENS`."""
    tokens, hidden = x.shape
    size, pairs, wide = layer.down.shape[2], experts.numel(), x.dtype == torch.float32
    hopper = on_hopper(x.device)
    constants = {
        "FIRST": held.first,
        "COUNT": held.count,
        "TOP_K": held.top_k,
        "PLACES": triton.next_power_of_2(held.top_k),
        "TOKENS": MAX_TOKENS,
        "TILED": layer.tiled,
        "OVERLAP": overlap,
    }
    middle = torch.empty(pairs, size, dtype=x.dtype, device=x.device)
    answers = torch.empty(pairs, hidden, dtype=torch.float32, device=x.device)

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
        _of_expert[(triton.cdiv(rows, _ROWS), pairs)](
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

    multiply(x, layer.gate_up, layer.gate_up_bias, middle, None, activation)
    if hopper and takes_down_of_few(middle, layer.down, pairs):
        down_of_few(middle, experts, weights, layer, answers, held, MAX_TOKENS, overlap)
    else:
        multiply(middle, layer.down, layer.down_bias, answers, weights, None)
    return combine(answers, experts, held, x.dtype, overlap, residual)
