"""Greedy tokens in Triton: programs find the best token of each split of a row, then the best of those."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from atom_core.kernels.launch import entry_kernel
from atom_core.kernels.triton_support import cdiv, next_power_of_2

if TYPE_CHECKING:
    from atom_core.kernels.greedy_tokens import Barred, GreedyTokensSpec

#: Logits of a block, which a program reads at once.
_BLOCK = 2048
#: The most splits of a row, and about the most of all rows.
_MAX_SPLITS, _PROGRAMS = 32, 512


@triton.jit
def _best(row, begin, end, vocab, below, last, AFTER: tl.constexpr, BLOCK: tl.constexpr):
    """The largest logit of a row's tokens ``begin .. end - 1``, and its token; of equal ones, the first.

    ``AFTER``: only of the tokens that come after ``last`` with logit ``below`` in that order. If there is none: minus
    infinity, and any token.
    """
    # Each lane has the first of its largest logits; among lanes with equal logits, the smallest token counts.
    lanes = tl.arange(0, BLOCK)
    highest = tl.full([BLOCK], float("-inf"), tl.float32)
    chosen = begin + lanes
    for first in tl.range(begin, end, BLOCK):
        token = first + lanes
        # The mask uses ``vocab``, not ``end``: it is a multiple of the elements that a lane loads at once.
        x = tl.load(row + token, mask=token < vocab, other=float("-inf")).to(tl.float32)
        better = x > highest
        if AFTER:
            better = better & ((x < below) | ((x == below) & (token > last)))
        highest = tl.where(better, x, highest)
        chosen = tl.where(better, token, chosen)
    top = tl.max(highest, 0)
    return top, tl.min(tl.where(highest == top, chosen, 0x7FFFFFFF), 0)


@entry_kernel
@triton.jit(do_not_specialize=["requests", "positions", "until", "counts", "blocks"])
def _best_of_splits(
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
    SPLITS: tl.constexpr,
    BARRED: tl.constexpr,
):
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    mine = logits + row * stride_logits
    begin = split * blocks * BLOCK
    end = min(begin + blocks * BLOCK, vocab)
    top, token = _best(mine, begin, end, vocab, 0.0, 0, False, BLOCK)
    if barred is not None:
        request = tl.load(requests + row).to(tl.int64)
        known = request >= 0
        short = known & (tl.load(positions + row) + 1 < tl.load(until + request, mask=known, other=0))
        count = tl.load(counts + request, mask=short, other=0)
        place = tl.arange(0, BARRED)
        taken = tl.load(barred + request * stride_barred + place, mask=place < count, other=-1)
        # The best token is seldom barred. A second search then costs less than comparing all tokens with the barred.
        while (top > float("-inf")) & (tl.max((taken == token).to(tl.int32), 0) > 0):
            top, token = _best(mine, begin, end, vocab, top, token, True, BLOCK)
    tl.store(best + row * SPLITS + split, top)
    tl.store(tokens + row * SPLITS + split, token)


@entry_kernel
@triton.jit(do_not_specialize=["splits"])
def _best_of_rows(best, tokens, result, splits, SPLITS: tl.constexpr):
    row, split = tl.program_id(0).to(tl.int64), tl.arange(0, SPLITS)
    highest = tl.load(best + row * SPLITS + split, mask=split < splits, other=float("-inf"))
    token = tl.load(tokens + row * SPLITS + split, mask=split < splits, other=0x7FFFFFFF)
    tl.store(result + row, tl.min(tl.where(highest == tl.max(highest, 0), token, 0x7FFFFFFF), 0).to(tl.int64))


class TritonGreedyTokens:
    """See :class:`atom_core.kernels.greedy_tokens.GreedyTokensKernel`."""

    def __init__(self, spec: GreedyTokensSpec) -> None:
        self.vocab_size = spec.vocab_size

    def __call__(
        self,
        logits: torch.Tensor,
        requests: torch.Tensor | None = None,
        positions: torch.Tensor | None = None,
        barred: Barred | None = None,
    ) -> torch.Tensor:
        """See :class:`atom_core.kernels.greedy_tokens.GreedyTokensKernel`."""
        rows, vocab = logits.shape
        assert vocab == self.vocab_size
        assert logits.stride(1) == 1
        result = torch.empty(rows, dtype=torch.int64, device=logits.device)
        if not rows:
            return result
        blocks = cdiv(vocab, _BLOCK)
        # The fewest whole blocks in a split with which there are not too many splits; no split is empty.
        each = cdiv(blocks, max(1, min(_MAX_SPLITS, _PROGRAMS // rows)))
        splits = cdiv(blocks, each)
        best = torch.empty(rows, _MAX_SPLITS, dtype=torch.float32, device=logits.device)
        tokens = torch.empty(rows, _MAX_SPLITS, dtype=torch.int32, device=logits.device)
        # Without barred tokens no argument by request is read, and one kernel serves their integer dtypes.
        by_request: tuple[torch.Tensor | None, ...] = (None,) * 5
        if barred is not None:
            assert requests is not None
            assert positions is not None
            assert requests.stride(0) == positions.stride(0) == 1
            by_request = requests, positions, *barred
        taken = by_request[-1]
        _best_of_splits[(rows, splits)](
            logits,
            *by_request,
            best,
            tokens,
            vocab,
            each,
            logits.stride(0),
            0 if taken is None else taken.stride(0),
            BLOCK=_BLOCK,
            SPLITS=_MAX_SPLITS,
            BARRED=1 if taken is None else next_power_of_2(taken.shape[1]),
            num_warps=8,
        )
        _best_of_rows[(rows,)](best, tokens, result, splits, SPLITS=_MAX_SPLITS, num_warps=1)
        return result
