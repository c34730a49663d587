"""Logits with known argmax tokens, for every implementation of the op."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from atom_core.kernels.greedy_tokens import Barred, GreedyTokensKernel


@dataclass(frozen=True)
class GreedyCase:
    """``rows`` of logits."""

    rows: int
    vocab_size: int
    dtype: torch.dtype = torch.bfloat16
    barred: int | None = None
    """The largest number of tokens that a request must not take."""
    pad: int = 0
    """NaNs after each row, as if the head has more rows than the vocabulary."""


CASES = {
    "one row of one token": GreedyCase(1, 1),
    "one row": GreedyCase(1, 5000, barred=1),
    "a part of one block more": GreedyCase(3, 4097, torch.float32, barred=3),
    "whole blocks": GreedyCase(2, 8192, torch.float16),
    "rows of a wider head": GreedyCase(5, 1003, barred=2, pad=21),
    "more blocks than parts": GreedyCase(2, 33 * 4096 + 5, barred=128),
    "many rows": GreedyCase(300, 9000, barred=1),
    "more rows than parts of all": GreedyCase(1100, 130),
}


class Logits:
    """A case's tensors; :meth:`check` runs a kernel on them.

    There are few distinct values, so each row has its maximum many times. Half of the requests are long enough for
    the tokens that they must not take, and every fifth row belongs to no request.
    """

    def __init__(self, case: GreedyCase, device: torch.device | str = "cpu", seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        rows, vocab = case.rows, case.vocab_size
        held = torch.full((rows, vocab + case.pad), torch.nan, dtype=case.dtype)
        held[:, :vocab] = torch.randint(-3, 4, (rows, vocab), generator=generator)
        self.logits = held[:, :vocab]
        self.requests = torch.randperm(rows + 4, generator=generator)[:rows].int()
        self.positions = torch.randint(0, 1000, (rows,), generator=generator)
        until = torch.zeros(rows + 4, dtype=torch.int32)
        until[self.requests] = self.positions.int() + 1 + torch.arange(rows, dtype=torch.int32) % 2
        self.requests[4::5] = -1
        self.barred = None
        if case.barred is not None:
            # The row's own first choices, so that barring them changes the answer; what is behind counts is any number.
            tokens = torch.full((rows + 4, case.barred), 1 << 30, dtype=torch.int32)
            counts = torch.randint(1, case.barred + 1, (rows + 4,), generator=generator, dtype=torch.int32)
            for row, request in enumerate(self.requests.tolist()):
                if request >= 0:
                    count = int(counts[request])
                    tokens[request, :count] = self.logits[row].float().topk(count).indices.flip(0)
            self.barred = Barred(until, counts, tokens)
        self.expected = [self._first(row) for row in range(rows)]
        for name in ("requests", "positions"):
            setattr(self, name, getattr(self, name).to(device))
        self.logits = held.to(device)[:, :vocab]
        if self.barred is not None:
            self.barred = Barred(*(it.to(device) for it in self.barred))

    def _first(self, row: int) -> int:
        numbers, request = self.logits[row].tolist(), int(self.requests[row])
        if self.barred is not None and request >= 0 and self.positions[row] + 1 < self.barred.until[request]:
            for token in self.barred.tokens[request, : int(self.barred.counts[request])].tolist():
                numbers[token] = float("-inf")
        return numbers.index(max(numbers))

    def run(self, kernel: GreedyTokensKernel) -> torch.Tensor:
        """The output of ``kernel``."""
        return kernel(self.logits, self.requests, self.positions, self.barred)

    def check(self, found: torch.Tensor) -> None:
        """Compare it with the expected tokens."""
        assert found.dtype == torch.int64
        assert found.tolist() == self.expected
