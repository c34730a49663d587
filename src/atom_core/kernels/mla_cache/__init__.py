"""From a token's raw latent to its row in the cache, and rope of its queries.

``latent``: ``[T, L + R]``, the projection's output; ``q``: ``[T, H, N + R]``; both of any strides with a contiguous
last dimension. ``cos_sin [P, R]`` has a row for each position:

    row = rms_norm(latent[:L]) * weight, rotate(latent[L:])
    q[h, N:] = rotate(q[h, N:]), in place

The row goes to the token's slot; tokens with a negative slot write none. An FP8 cache stores ``row / scale``, clamped
to its range. Multi-head latent attention: DeepSeek-V2, arXiv 2405.04434.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch

from atom_core.cache import LatentCacheView
from atom_core.kernels.cache_dtypes import why_unreadable
from atom_core.kernels.mla_cache.reference import mla_cache
from atom_core.kernels.select import Implementation, Op, Target
from atom_core.kernels.triton_support import overlaps, why_no_triton, why_no_triton_cache


@dataclass(frozen=True)
class MlaSpec:
    """The shapes of one attention layer over latents on this rank."""

    num_heads: int
    """H"""
    rank: int
    """L: the rank of the latent that keys and values are projected from."""
    nope_dim: int
    """N: the dimension of a head's query and key without rope."""
    rope_dim: int
    """R: the dimension with rope."""
    value_dim: int
    """V: the dimension of a head's value."""
    interleaved: bool
    dtype: torch.dtype
    cache_dtype: torch.dtype

    @property
    def row(self) -> int:
        """Elements of a token's row in the cache."""
        return self.rank + self.rope_dim


@dataclass(frozen=True)
class MlaWeights:
    """The weights of latents: the model's own parameters, not copies.

    ``cos_sin``: float32 ``[P, R]``; ``norm``: ``[L]``, the latent's norm with ``eps``; ``expand``: ``[H, N + V, L]``,
    which projects a latent to a head's key (without its rope dimension) and value.
    """

    cos_sin: torch.Tensor
    norm: torch.Tensor
    eps: float
    expand: torch.Tensor


class MlaCacheKernel(Protocol):
    """The call: ``(q, latent, positions [T], weights, cache, slots [T])``; ``q`` is rotated in place."""

    def __call__(
        self,
        q: torch.Tensor,
        latent: torch.Tensor,
        positions: torch.Tensor,
        weights: MlaWeights,
        cache: LatentCacheView,
        slots: torch.Tensor,
    ) -> None: ...


def _reference_supports(spec: MlaSpec, target: Target) -> str | None:
    return why_unreadable(spec.cache_dtype)


def _triton_supports(spec: MlaSpec, target: Target) -> str | None:
    return why_no_triton(target) or why_no_triton_cache(spec.dtype, spec.cache_dtype, target)


def _build_triton(spec: MlaSpec, target: Target) -> MlaCacheKernel:
    from atom_core.kernels.mla_cache.triton_kernel import TritonMlaCache  # needs triton, which a CPU may lack

    return TritonMlaCache(spec, overlaps(target))


MLA_CACHE: Op[MlaSpec, MlaCacheKernel] = Op(
    "mla_cache",
    (
        Implementation("triton", _triton_supports, _build_triton),
        Implementation("reference", _reference_supports, lambda spec, target: partial(mla_cache, spec=spec)),
    ),
)
