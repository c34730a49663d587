"""Greedy tokens in torch; if tokens are barred, with a mask as large as the logits."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from atom_core.kernels.greedy_tokens import Barred, GreedyTokensSpec


class ReferenceGreedyTokens:
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
        if barred is not None:
            assert requests is not None
            assert positions is not None
            mine = requests.clamp(min=0).long()
            places = torch.arange(barred.tokens.shape[1], device=logits.device)
            counts = torch.where((requests >= 0) & (positions + 1 < barred.until[mine]), barred.counts[mine], 0)
            # Unused entries, and tokens that the vocabulary does not have, go to an extra column.
            tokens = barred.tokens[mine].long()
            used = (places < counts[:, None]) & (tokens < self.vocab_size)
            taken = torch.where(used, tokens, self.vocab_size)
            mask = torch.zeros(len(logits), self.vocab_size + 1, dtype=torch.bool, device=logits.device)
            logits = logits.masked_fill(mask.scatter_(1, taken, True)[:, :-1], -torch.inf)
        return logits.argmax(1)
