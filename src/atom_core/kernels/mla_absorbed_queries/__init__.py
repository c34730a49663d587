"""The ops before attention over latents in one launch: the latent's cache row, and the absorbed queries.

The result is that of :mod:`atom_core.kernels.mla_cache` followed by :mod:`atom_core.kernels.head_linear` into latents,
but ``q`` is not changed:

    queries[t, h] = q[t, h, :N] expand[h, :N], rotate(q[t, h, N:])

``q``: ``[T, H, N + R]``; ``latent``: ``[T, L + R]``; ``queries``: ``[T, H, L + R]``, written. It is for few tokens; the
separate ops run more.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from atom_core.cache import LatentCacheView
from atom_core.kernels.mla_cache import MlaSpec, MlaWeights
from atom_core.kernels.select import Implementation, Op, Target, always
from atom_core.kernels.triton_support import overlaps, why_not_fused


@dataclass(frozen=True)
class MlaAbsorbedQueriesSpec:
    """One attention layer.

    ``separate`` has the (op, implementation) selected for the single ops. The fused kernel replaces Triton's.
    """

    latent: MlaSpec
    separate: tuple[tuple[str, str], ...]


class MlaAbsorbedQueriesKernel(Protocol):
    """The call: ``(q, latent, positions [T], weights, cache, slots [T], queries)``."""

    max_tokens: int
    """The most tokens of a call; the fewest are 1."""

    def __call__(
        self,
        q: torch.Tensor,
        latent: torch.Tensor,
        positions: torch.Tensor,
        weights: MlaWeights,
        cache: LatentCacheView,
        slots: torch.Tensor,
        queries: torch.Tensor,
    ) -> None: ...


def _triton_supports(spec: MlaAbsorbedQueriesSpec, target: Target) -> str | None:
    return why_not_fused(spec.separate)


def _build_triton(spec: MlaAbsorbedQueriesSpec, target: Target) -> MlaAbsorbedQueriesKernel | None:
    from atom_core.kernels.mla_absorbed_queries.triton_kernel import (
        TritonMlaAbsorbedQueries,  # needs triton, which a CPU may lack
    )

    return TritonMlaAbsorbedQueries(spec.latent, overlaps(target))


#: "separate" is no kernel: mla_cache and head_linear run.
MLA_ABSORBED_QUERIES: Op[MlaAbsorbedQueriesSpec, MlaAbsorbedQueriesKernel | None] = Op(
    "mla_absorbed_queries",
    (
        Implementation("triton", _triton_supports, _build_triton),
        Implementation("separate", always, lambda spec, target: None),
    ),
)
