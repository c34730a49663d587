"""What is in front of attention over latents at once: the latent's row in the cache, and queries that meet latents.

:mod:`atom_core.kernels.latent_cache`, then :mod:`atom_core.kernels.head_linear` into latents, with the same results but
that ``q`` is left as it is:

    queries[t, h] = q[t, h, :N] expand[h, :N], rotate(q[t, h, N:])

``q``: ``[T, H, N + R]``; ``latent``: ``[T, L + R]``; ``queries``: ``[T, H, L + R]``, written. It is for few tokens:
more are run by the ops that it is made of.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from atom_core.cache import LatentCacheView
from atom_core.kernels.latent_cache import LatentSpec, LatentWeights
from atom_core.kernels.select import Implementation, Op, Target, always
from atom_core.kernels.triton_support import overlaps, why_not_fused


@dataclass(frozen=True)
class LatentQueriesSpec:
    """One attention layer.

    ``separate`` names the implementation that was chosen for each op by itself: what is fused is Triton's.
    """

    latent: LatentSpec
    separate: tuple[tuple[str, str], ...]


class LatentQueriesKernel(Protocol):
    """The call: ``(q, latent, positions [T], weights, cache, slots [T], queries)``."""

    max_tokens: int
    """Tokens up to which it is to be called, from 1 on."""

    def __call__(
        self,
        q: torch.Tensor,
        latent: torch.Tensor,
        positions: torch.Tensor,
        weights: LatentWeights,
        cache: LatentCacheView,
        slots: torch.Tensor,
        queries: torch.Tensor,
    ) -> None: ...


def _triton_supports(spec: LatentQueriesSpec, target: Target) -> str | None:
    return why_not_fused(spec.separate)


def _build_triton(spec: LatentQueriesSpec, target: Target) -> LatentQueriesKernel | None:
    from atom_core.kernels.latent_queries.triton_kernel import TritonLatentQueries  # needs triton, which a CPU may lack

    return TritonLatentQueries(spec.latent, overlaps(target))


#: "separate" is no kernel: the cache is filled, then queries are multiplied.
LATENT_QUERIES: Op[LatentQueriesSpec, LatentQueriesKernel | None] = Op(
    "latent_queries",
    (
        Implementation("triton", _triton_supports, _build_triton),
        Implementation("separate", always, lambda spec, target: None),
    ),
)
