"""The likeliest token of each row of logits, and of several that are the one with the least number.

``logits``: ``[T, vocabulary]``. Row ``t`` belongs to request ``requests[t]``, or to none where that is negative. A
request may have tokens that it must not take yet: those that would end it before it has as many tokens as it was asked
for. They are given as a table by request, :class:`Barred`, and hold while the next token's position is below ``until``.

A sampler that copies logits to float32, masks them there and then looks for the largest moves five times what this
reads: 52 MB for 256 rows of 102,400 logits in bfloat16.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from atom_core.kernels.greedy_tokens.reference import ReferenceGreedyTokens
from atom_core.kernels.select import Implementation, Op, Target, always
from atom_core.kernels.triton_support import why_no_triton


@dataclass(frozen=True)
class GreedyTokensSpec:
    """One head."""

    vocab_size: int


class Barred(NamedTuple):
    """What requests must not take yet, by request."""

    until: torch.Tensor
    """Integers ``[R]``: tokens below which a request must not end."""
    counts: torch.Tensor
    """Integers ``[R]``: how many of a request's ``tokens`` are any."""
    tokens: torch.Tensor
    """Integers ``[R, most]``."""


class GreedyTokensKernel(Protocol):
    """See the module's text."""

    def __call__(
        self, logits: torch.Tensor, requests: torch.Tensor, positions: torch.Tensor, barred: Barred | None = None
    ) -> torch.Tensor:
        """Return int64 ``[T]``.

        Args:
            logits: ``[T, vocabulary]``, not written to. Rows that have no number above minus infinity give 0.
            requests: integers ``[T]``, rows of ``barred``.
            positions: integers ``[T]``, of the tokens that these logits follow.
            barred: None where no request has any.
        """


def _triton_supports(spec: GreedyTokensSpec, target: Target) -> str | None:
    return why_no_triton(target)


def _build_triton(spec: GreedyTokensSpec, target: Target) -> GreedyTokensKernel:
    from atom_core.kernels.greedy_tokens.triton_kernel import TritonGreedyTokens  # needs triton, which a CPU may lack

    return TritonGreedyTokens(spec)


GREEDY_TOKENS: Op[GreedyTokensSpec, GreedyTokensKernel] = Op(
    "greedy_tokens",
    (
        Implementation("triton", _triton_supports, _build_triton),
        Implementation("reference", always, lambda spec, target: ReferenceGreedyTokens(spec)),
    ),
)
