"""Experts of many tokens in Triton: pairs of a token and an expert are sorted by expert, then multiplied in blocks.

A block is some rows of one expert. How many there are is known to the GPU alone, so launches are for as many as there
may be, and blocks behind the last do nothing: nothing waits for the host, and a graph fits any routing.

Blocks of the last expert come first. Those that all tokens share are the last ones, with several blocks each that read
the same weights: in front the second-level cache gives them while memory gives the first of the others, where at the
end memory would wait. On an H100 a step of DeepSeek V2-Lite takes 0.8% less so with 128 and 192 requests, and 0.2 to
0.3% less with 64 and 256.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from atom_core.kernels.eviction import EVICT_LAST
from atom_core.kernels.experts.tiled import FAR, column_at, row_at
from atom_core.kernels.gated_activation.triton_kernel import gated
from atom_core.kernels.linear.parts import weight_rows
from atom_core.kernels.linear.tiles import on_hopper, why_no_gluon
from atom_core.kernels.triton_support import launch_options

if TYPE_CHECKING:
    from atom_core.kernels.experts import ExpertWeights

if why_no_gluon() is None:
    from atom_core.kernels.experts.few_pairs_hopper import multiply_few_pairs
    from atom_core.kernels.experts.hopper import multiply_on_hopper, takes
    from atom_core.kernels.experts.pairs_hopper import PAIRS, multiply_pairs, takes_pairs

#: Pairs that one program sorts.
_PAIRS = 256
#: Pairs up to which each program looks at all of them, in one launch in place of five: nine experts of 256 tokens.
_FEW_PAIRS = 9 * 256


@triton.jit(do_not_specialize=["pairs"])
def _count(
    experts,
    counts,
    ranks,
    pairs,
    FIRST: tl.constexpr,
    COUNT: tl.constexpr,
    PAIRS: tl.constexpr,
):
    """How many pairs each expert has, and each pair's place among its expert's, in any order."""
    pair = tl.program_id(0) * PAIRS + tl.arange(0, PAIRS)
    expert = tl.load(experts + pair, mask=pair < pairs, other=FIRST - 1) - FIRST
    held = (expert >= 0) & (expert < COUNT)
    rank = tl.atomic_add(counts + tl.where(held, expert, 0), 1, mask=held, sem="relaxed")
    tl.store(ranks + pair, rank, mask=held)


@triton.jit
def _arrange(counts, first_blocks, block_experts, COUNT: tl.constexpr, PADDED: tl.constexpr, BLOCK_M: tl.constexpr):
    """The first block of each expert, and the expert of each block that is one's."""
    expert = tl.arange(0, PADDED)
    number = tl.load(counts + expert, mask=expert < COUNT, other=0)
    needed = (number + BLOCK_M - 1) // BLOCK_M
    first = tl.sum(needed, 0) - tl.cumsum(needed, 0)
    tl.store(first_blocks + expert, first, mask=expert < COUNT)
    # As often as one expert has blocks: few, however many experts and blocks there are.
    for index in range(tl.max(needed, 0)):
        tl.store(block_experts + first + index, expert, mask=index < needed)


@triton.jit(do_not_specialize=["pairs"])
def _place(
    experts,
    ranks,
    first_blocks,
    slots,
    pairs,
    FIRST: tl.constexpr,
    COUNT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    PAIRS: tl.constexpr,
):
    """Each pair into the blocks of its expert."""
    pair = tl.program_id(0) * PAIRS + tl.arange(0, PAIRS)
    expert = tl.load(experts + pair, mask=pair < pairs, other=FIRST - 1) - FIRST
    held = (expert >= 0) & (expert < COUNT)
    first = tl.load(first_blocks + expert, mask=held, other=0)
    rank = tl.load(ranks + pair, mask=held, other=0)
    tl.store(slots + first * BLOCK_M + rank, pair, mask=held)


@triton.jit(do_not_specialize=["num_blocks"])
def _sort(
    experts,
    block_experts,
    slots,
    pairs,
    num_blocks,
    FIRST: tl.constexpr,
    COUNT: tl.constexpr,
    BINS: tl.constexpr,
    PAIRS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """All of :func:`_count`, :func:`_arrange` and :func:`_place`: a program an expert, which looks at all pairs.

    None waits for another, and pairs keep their order. Blocks behind the last are shared out among programs.
    """
    if OVERLAP:
        tl.extra.cuda.gdc_wait()  # before anything is written: kernels in front may still read what was there
        tl.extra.cuda.gdc_launch_dependents()
    expert = tl.program_id(0)
    pair = tl.arange(0, PAIRS)
    whose = tl.load(experts + pair, mask=pair < pairs, other=FIRST - 1) - FIRST
    # Others' pairs have a bin behind those of experts.
    numbers = tl.histogram(tl.where((whose >= 0) & (whose < COUNT), whose, COUNT), BINS)
    each = tl.arange(0, BINS)
    needed = tl.where(each < COUNT, (numbers + BLOCK_M - 1) // BLOCK_M, 0)
    first = tl.sum(tl.where(each > expert, needed, 0), 0)
    behind = first + tl.sum(tl.where(each == expert, needed, 0), 0)
    mine = (whose == expert).to(tl.int32)
    tl.store(slots + first * BLOCK_M + tl.cumsum(mine, 0) - 1, pair, mask=mine > 0, eviction_policy=EVICT_LAST)
    place = tl.arange(0, BLOCK_M)
    empty = first * BLOCK_M + tl.sum(mine, 0) + place
    tl.store(slots + empty, tl.full([BLOCK_M], -1, tl.int32), mask=empty < behind * BLOCK_M, eviction_policy=EVICT_LAST)
    for block in range(first, behind):
        tl.store(block_experts + block, expert, eviction_policy=EVICT_LAST)
    for block in range(tl.sum(needed, 0) + expert, num_blocks, COUNT):
        tl.store(block_experts + block, -1, eviction_policy=EVICT_LAST)
        tl.store(slots + block * BLOCK_M + place, tl.full([BLOCK_M], -1, tl.int32), eviction_policy=EVICT_LAST)


@triton.jit
def finish_block(
    total,
    weights,
    bias,
    out,
    expert,
    pair,
    slot,
    used,
    row,
    N,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ACTIVATION: tl.constexpr,
):
    """Add the bias to a block's ``total``, and activate it or give it its pairs' weights; see :func:`_multiply`."""
    if bias is not None:
        total += tl.load(bias + expert * N + row).to(tl.float32)[None, :]
    if ACTIVATION is not None:
        gate, up = tl.split(tl.reshape(total, (BLOCK_M, BLOCK_N // 2, 2)))
        # Rounded where a kernel of its own would read them.
        gate = gate.to(out.dtype.element_ty).to(tl.float32)
        up = up.to(out.dtype.element_ty).to(tl.float32)
        total = gated(gate, up, ACTIVATION)
        width = N // 2
        to = tl.program_id(0) * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
        out_row = slot
    else:
        total *= tl.load(weights + pair, mask=used, other=0.0)[:, None]
        width = N
        to = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
        out_row = pair
    tl.store(
        out + out_row[:, None] * width + to[None, :],
        total.to(out.dtype.element_ty),
        mask=used[:, None] & (to < width)[None, :],
        eviction_policy=EVICT_LAST,
    )


@triton.jit
def load_tiles(x_at, at, used, column, begin, K, EVEN: tl.constexpr, FAR: tl.constexpr = 1):
    """The columns from ``begin`` on of a block's rows of the input and of the weight; see :func:`_multiply`.

    ``FAR``: how far the weight's columns are apart, where those of one tile lie together.
    """
    if EVEN:
        left = tl.load(x_at + begin, mask=used[:, None], other=0.0)
        right = tl.load(at + begin * FAR)
    else:
        known = begin + column < K
        left = tl.load(x_at + begin, mask=used[:, None] & known[None, :], other=0.0)
        right = tl.load(at + begin * FAR, mask=known[:, None], other=0.0)
    return left, right


@triton.jit
def _multiply(
    x,
    slots,
    block_experts,
    weights,
    weight,
    bias,
    out,
    K,
    N,
    stride_x,
    TOP_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    EVEN: tl.constexpr,
    ACTIVATION: tl.constexpr,
    TILED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """A block of rows of one expert by some rows of its weight.

    With an activation rows of ``x`` are those of the pairs' tokens, and the result goes where the block is; without,
    rows of ``x`` are the block's, and the result, times the pair's weight, goes where the pair is. ``EVEN``: ``K`` is a
    multiple of ``BLOCK_K``.
    """
    GATED: tl.constexpr = ACTIVATION is not None
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    block = tl.program_id(1)
    expert = tl.load(block_experts + block).to(tl.int64)
    if expert < 0:
        return
    slot = block.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    pair = tl.load(slots + slot).to(tl.int64)
    used = pair >= 0
    row = weight_rows(N, BLOCK_N, GATED)
    column = tl.arange(0, BLOCK_K)
    x_row = pair // TOP_K if GATED else slot
    x_at = x + x_row[:, None] * stride_x + column[None, :]
    at = weight + expert * N * K + row_at(row, K, TILED)[None, :] + column_at(column, TILED)[:, None]
    far: tl.constexpr = FAR if TILED else 1
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for begin in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        left, right = load_tiles(x_at, at, used, column, begin, K, EVEN, far)
        total = tl.dot(left, right, total, input_precision="ieee")
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
    finish_block(total, weights, bias, out, expert, pair, slot, used, row, N, BLOCK_M, BLOCK_N, ACTIVATION)


@triton.jit
def _combine(
    answers,
    experts,
    residual,
    y,
    N,
    FIRST: tl.constexpr,
    COUNT: tl.constexpr,
    TOP_K: tl.constexpr,
    WHOLE: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """The sum of a token's answers, always in the order of its experts; ``WHOLE``: all of them are held."""
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for place in tl.static_range(TOP_K):
        pair = token * TOP_K + place
        held = column < N
        if not WHOLE:
            expert = tl.load(experts + pair + tl.zeros([BLOCK], tl.int32)) - FIRST
            held &= (expert >= 0) & (expert < COUNT)
        total += tl.load(answers + pair * N + column, mask=held, other=0.0).to(tl.float32)
    if residual is not None:
        total += tl.load(residual + token * N + column, mask=column < N, other=0.0).to(tl.float32)
    tl.store(y + token * N + column, total.to(y.dtype.element_ty), mask=column < N, eviction_policy=EVICT_LAST)


@dataclass(frozen=True)
class Held:
    """The experts that this rank holds, ``count`` from ``first`` on, and how many a token goes to."""

    first: int
    count: int
    top_k: int
    whole: bool = False
    """Whether it is known that these are all there are."""
    shared: int = 0
    """How many of them, the last, every token goes to."""


@dataclass(frozen=True)
class Blocks:
    """Pairs by expert, those of the last in front."""

    rows: int
    """Of a block."""
    slots: torch.Tensor
    """int32 ``[blocks x rows]``: the pair that is there; -1: none."""
    experts: torch.Tensor
    """int32 ``[blocks]``: whose a block is; -1: nobody's."""


def sort_by_expert(experts: torch.Tensor, held: Held, rows: int, overlap: bool = False) -> Blocks:
    """The pairs of ``experts [T, k]`` in blocks of ``rows``, none of which has two experts.

    ``overlap``: see :func:`atom_core.kernels.triton_support.overlaps`.
    """
    pairs, device = experts.numel(), experts.device
    # Each expert may leave one block unfilled.
    num_blocks = min(pairs, held.count) + pairs // rows
    both = torch.empty(num_blocks * (rows + 1), dtype=torch.int32, device=device)
    slots, block_experts = both[: num_blocks * rows], both[num_blocks * rows :]
    constants = {"FIRST": held.first, "COUNT": held.count}
    if pairs <= _FEW_PAIRS:
        _sort[(held.count,)](
            experts,
            block_experts,
            slots,
            pairs,
            num_blocks,
            BINS=triton.next_power_of_2(held.count + 1),
            PAIRS=triton.next_power_of_2(pairs),
            BLOCK_M=rows,
            OVERLAP=overlap,
            # Of 256 tokens of DeepSeek V2-Lite a step on an H200 takes 0.1 to 0.2% less by eight.
            num_warps=4 if pairs <= 1024 else 8,
            **constants,
            **launch_options(overlap),
        )
        return Blocks(rows, slots, block_experts)
    # What no pair and no expert is written to is -1, which both are filled with at once.
    both.fill_(-1)
    counts = torch.zeros(held.count, dtype=torch.int32, device=device)
    first_blocks = torch.empty_like(counts)
    ranks = torch.empty(pairs, dtype=torch.int32, device=device)
    grid = (triton.cdiv(pairs, _PAIRS),)
    _count[grid](experts, counts, ranks, pairs, PAIRS=_PAIRS, **constants)
    _arrange[(1,)](
        counts,
        first_blocks,
        block_experts,
        COUNT=held.count,
        PADDED=triton.next_power_of_2(held.count),
        BLOCK_M=rows,
    )
    _place[grid](experts, ranks, first_blocks, slots, pairs, BLOCK_M=rows, PAIRS=_PAIRS, **constants)
    return Blocks(rows, slots, block_experts)


def combine(
    answers: torch.Tensor,
    experts: torch.Tensor,
    held: Held,
    dtype: torch.dtype,
    overlap: bool,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """``[T, H]`` in ``dtype``, the sum over each token's experts of ``answers [T k, H]``.

    Those of experts not held are not read. ``residual``: contiguous; it is added to, and is the result.
    """
    tokens, hidden = len(experts), answers.shape[1]
    y = torch.empty(tokens, hidden, dtype=dtype, device=answers.device) if residual is None else residual
    # Of few tokens, more programs.
    block = min(256 if tokens <= 16 else 512 if tokens <= 64 else 1024, triton.next_power_of_2(hidden))
    _combine[(tokens, triton.cdiv(hidden, block))](
        answers,
        experts,
        residual,
        y,
        hidden,
        FIRST=held.first,
        COUNT=held.count,
        TOP_K=held.top_k,
        WHOLE=held.whole,
        BLOCK=block,
        OVERLAP=overlap,
        **launch_options(overlap),
    )
    return y


#: How many times an expert's average its blocks have room for in 16 bits. Without, half of the experts have more than
#: the block of an average that is a power of two, and are read twice: at 256 tokens and an average of 16 a step of
#: Qwen3 30B-A3B takes 22.0 ms on an H200, and 21.0 ms in blocks of 32.
ROOM = 1.25


def block_rows(tokens: int, held: Held, room: float = 1.0) -> int:
    """Rows of a block: as many as an expert has on average, ``room`` times, in powers of two."""
    average = triton.cdiv(tokens * held.top_k, held.count)
    return int(min(128, max(16, triton.next_power_of_2(math.ceil(average * room)))))


def many_tokens(
    x: torch.Tensor,
    weights: torch.Tensor,
    experts: torch.Tensor,
    layer: ExpertWeights,
    held: Held,
    activation: int,
    overlap: bool,
    residual: torch.Tensor | None,
) -> torch.Tensor:
    """See :func:`atom_core.kernels.experts.few_tokens.one_token`."""
    tokens, hidden = x.shape
    size = layer.down.shape[2]
    rows = block_rows(tokens, held, ROOM)
    if held.shared and on_hopper(x.device) and takes_pairs(x, layer.gate_up):
        # Of experts that all tokens share each block reads the weight: two of them, as far as blocks go. Those of the
        # others cost little where half of their places or more are empty.
        rows = max(rows, min(PAIRS[-1], triton.next_power_of_2(triton.cdiv(tokens, 2))))
    blocks = sort_by_expert(experts, held, rows, overlap)
    middle = torch.empty(len(blocks.slots), size, dtype=x.dtype, device=x.device)
    answers = torch.empty(tokens * held.top_k, hidden, dtype=x.dtype, device=x.device)
    for given, shares, weight, bias, out, act in (
        (x, None, layer.gate_up, layer.gate_up_bias, middle, activation),
        (middle, weights, layer.down, layer.down_bias, answers, None),
    ):
        if on_hopper(given.device) and takes_pairs(given, weight) and rows <= PAIRS[-1]:
            multiply = multiply_pairs if rows in PAIRS else multiply_few_pairs
            multiply(
                given,
                shares,
                weight,
                bias,
                out,
                blocks,
                top_k=held.top_k,
                activation=act,
                tiled=layer.tiled,
                overlap=overlap,
            )
        elif on_hopper(given.device) and takes(given, weight, blocks, 0, act is not None):
            multiply_on_hopper(
                given,
                None,
                blocks,
                shares,
                weight,
                None,
                bias,
                out,
                top_k=held.top_k,
                block=0,
                activation=act,
                tiled=layer.tiled,
                overlap=overlap,
            )
        else:
            _multiply_blocks(given, blocks, shares, weight, bias, out, held.top_k, act, layer.tiled, overlap)
    return combine(answers, experts, held, x.dtype, overlap, residual)


def _multiply_blocks(
    x: torch.Tensor,
    blocks: Blocks,
    weights: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    top_k: int,
    activation: int | None,
    tiled: bool,
    overlap: bool,
) -> None:
    """One product of all experts into ``out``; see :func:`_multiply`."""
    wide, few = x.dtype == torch.float32, blocks.rows < 64
    tile_rows = 64 if wide or few else 128
    columns = 32 if wide else 64
    _, rows, size = weight.shape
    _multiply[(triton.cdiv(rows, tile_rows), len(blocks.experts))](
        x,
        blocks.slots,
        blocks.experts,
        weights,
        weight,
        bias,
        out,
        size,
        rows,
        x.stride(0),
        TOP_K=top_k,
        BLOCK_M=blocks.rows,
        BLOCK_N=tile_rows,
        BLOCK_K=columns,
        STAGES=2 if wide else 3,
        EVEN=size % columns == 0,
        ACTIVATION=activation,
        TILED=tiled,
        OVERLAP=overlap,
        num_warps=4 if few else 8,
        **launch_options(overlap),
    )
