"""The token with the largest logit in each row; of equal ones, the token with the smallest id.

``logits``: ``[T, vocabulary]``. Row ``t`` belongs to request ``requests[t]``, or to no request if that is negative. A
request may have barred tokens: stop tokens, until it has its minimum number of tokens. :class:`Barred` has them by
request. They are barred while the next token's position is below ``until``.

A sampler that copies logits to float32, masks the copy and then takes its argmax moves five times the bytes that this
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
    """One LM head."""

    vocab_size: int


class Barred(NamedTuple):
    """Tokens that requests must not take yet."""

    until: torch.Tensor
    """Integers ``[R]``: the length in tokens below which a request must not end."""
    counts: torch.Tensor
    """Integers ``[R]``: how many of a request's ``tokens`` are used."""
    tokens: torch.Tensor
    """Integers ``[R, max count]``."""


class GreedyTokensKernel(Protocol):
    """See the module."""

    def __call__(
        self,
        logits: torch.Tensor,
        requests: torch.Tensor | None = None,
        positions: torch.Tensor | None = None,
        barred: Barred | None = None,
    ) -> torch.Tensor:
        """Return int64 ``[T]``.

        Args:
            logits: ``[T, vocabulary]``, not written to. Rows without a value above minus infinity give 0.
            requests: integers ``[T]``, rows of ``barred``; not read without it.
            positions: integers ``[T]``, of the tokens before these logits; not read without ``barred``.
            barred: None if no request has barred tokens.
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
