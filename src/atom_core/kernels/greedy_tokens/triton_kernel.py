"""The likeliest tokens in Triton: programs find the best of a row's parts, one of each row the best of those."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from atom_core.kernels.greedy_tokens import Barred, GreedyTokensSpec

#: Logits that a program reads at once.
_BLOCK = 2048
#: Parts of a row at most, and of all rows about.
_EACH, _ALL = 32, 512


@triton.jit
def _best(row, begin, end, vocab, below, behind, AFTER: tl.constexpr, BLOCK: tl.constexpr):
    """Of a row's tokens from ``begin`` to ``end`` the likeliest, of several the first, and its number.

    ``AFTER``: of those that come after the token ``behind`` and its number ``below`` in that order. Minus infinity,
    and any token, where there is none.
    """
    # Each lane keeps the first of its largest; of lanes with the same number the least token counts.
    lanes = tl.arange(0, BLOCK)
    highest = tl.full([BLOCK], float("-inf"), tl.float32)
    chosen = begin + lanes
    for first in tl.range(begin, end, BLOCK):
        token = first + lanes
        # By the vocabulary's end, which is a multiple of what a lane loads at once, as ``end`` need not be.
        x = tl.load(row + token, mask=token < vocab, other=float("-inf")).to(tl.float32)
        better = x > highest
        if AFTER:
            better = better & ((x < below) | ((x == below) & (token > behind)))
        highest = tl.where(better, x, highest)
        chosen = tl.where(better, token, chosen)
    top = tl.max(highest, 0)
    return top, tl.min(tl.where(highest == top, chosen, 0x7FFFFFFF), 0)


@triton.jit(do_not_specialize=["requests", "positions", "until", "counts", "blocks"])
def _best_of_parts(
    logits,
    requests,
    positions,
    until,
    counts,
    barred,
    best,
    tokens,
    vocab,
    blocks,
    stride_logits,
    stride_barred,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    BARRED: tl.constexpr,
):
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    mine = logits + row * stride_logits
    begin = part * blocks * BLOCK
    end = min(begin + blocks * BLOCK, vocab)
    top, token = _best(mine, begin, end, vocab, 0.0, 0, False, BLOCK)
    if barred is not None:
        request = tl.load(requests + row).to(tl.int64)
        known = request >= 0
        short = known & (tl.load(positions + row) + 1 < tl.load(until + request, mask=known, other=0))
        count = tl.load(counts + request, mask=short, other=0)
        place = tl.arange(0, BARRED)
        taken = tl.load(barred + request * stride_barred + place, mask=place < count, other=-1)
        # The likeliest is seldom barred, so it is looked for once more, which costs less than to compare all of them.
        while (top > float("-inf")) & (tl.max((taken == token).to(tl.int32), 0) > 0):
            top, token = _best(mine, begin, end, vocab, top, token, True, BLOCK)
    tl.store(best + row * PARTS + part, top)
    tl.store(tokens + row * PARTS + part, token)


@triton.jit(do_not_specialize=["parts"])
def _best_of_rows(best, tokens, result, parts, PARTS: tl.constexpr):
    row, part = tl.program_id(0).to(tl.int64), tl.arange(0, PARTS)
    highest = tl.load(best + row * PARTS + part, mask=part < parts, other=float("-inf"))
    token = tl.load(tokens + row * PARTS + part, mask=part < parts, other=0x7FFFFFFF)
    tl.store(result + row, tl.min(tl.where(highest == tl.max(highest, 0), token, 0x7FFFFFFF), 0).to(tl.int64))


class TritonGreedyTokens:
    """See :class:`atom_core.kernels.greedy_tokens.GreedyTokensKernel`."""

    def __init__(self, spec: GreedyTokensSpec) -> None:
        self.vocab_size = spec.vocab_size

    def __call__(
        self, logits: torch.Tensor, requests: torch.Tensor, positions: torch.Tensor, barred: Barred | None = None
    ) -> torch.Tensor:
        """See :class:`atom_core.kernels.greedy_tokens.GreedyTokensKernel`."""
        rows, vocab = logits.shape
        assert vocab == self.vocab_size
        assert logits.stride(1) == requests.stride(0) == positions.stride(0) == 1
        result = torch.empty(rows, dtype=torch.int64, device=logits.device)
        if not rows:
            return result
        blocks = triton.cdiv(vocab, _BLOCK)
        # Whole blocks each, as few as make no more parts than there may be, none of them empty.
        each = triton.cdiv(blocks, max(1, min(_EACH, _ALL // rows)))
        parts = triton.cdiv(blocks, each)
        best = torch.empty(rows, _EACH, dtype=torch.float32, device=logits.device)
        tokens = torch.empty(rows, _EACH, dtype=torch.int32, device=logits.device)
        # Without what is barred nothing else of the requests is looked at, and integers of any size are one kernel.
        by_request = (None,) * 5 if barred is None else (requests, positions, *barred)
        taken = by_request[-1]
        _best_of_parts[(rows, parts)](
            logits,
            *by_request,
            best,
            tokens,
            vocab,
            each,
            logits.stride(0),
            0 if taken is None else taken.stride(0),
            BLOCK=_BLOCK,
            PARTS=_EACH,
            BARRED=1 if taken is None else triton.next_power_of_2(taken.shape[1]),
            num_warps=8,
        )
        _best_of_rows[(rows,)](best, tokens, result, parts, PARTS=_EACH, num_warps=1)
        return result
