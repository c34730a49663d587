"""Split raw qkv, norm the heads of q and k, rotate both.

``qkv``: ``[T, (H + 2K) * D]``: ``H`` query heads, then ``K`` key and ``K`` value heads, each of size ``D``.
Per head: ``x / sqrt(mean(x^2) + eps) * weight`` if the model has q/k norm, then the first ``R`` elements are rotated
by the row of ``cos_sin [P, R]`` at the token's position. Results: q ``[T, H, D]``, k and v ``[T, K, D]``.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch

from atom_core.kernels.qk_norm_rope.reference import qk_norm_rope
from atom_core.kernels.select import Implementation, Op, always


@dataclass(frozen=True)
class QkvSpec:
    """The shapes of one attention layer's qkv on this rank."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int
    interleaved: bool
    qk_norm: bool
    dtype: torch.dtype
    float32_norms: bool = False
    """Whether the norms' weights are float32 where the dtype has 16 bits."""


@dataclass(frozen=True)
class QkvWeights:
    """The rope table, float32 ``cos_sin [P, R]``, and the q/k norms' weights ``[D]``, if any, in the dtype or float32.

    The weights are the model's own parameters, not copies: loading writes into them.
    """

    cos_sin: torch.Tensor
    q_norm: torch.Tensor | None = None
    k_norm: torch.Tensor | None = None
    eps: float = 0.0


class QkNormRopeKernel(Protocol):
    """The call: ``(qkv, positions [T], weights)`` to ``(q, k, v)``."""

    def __call__(
        self, qkv: torch.Tensor, positions: torch.Tensor, weights: QkvWeights
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]: ...


QK_NORM_ROPE: Op[QkvSpec, QkNormRopeKernel] = Op(
    "qk_norm_rope", (Implementation("reference", always, lambda spec, target: partial(qk_norm_rope, spec=spec)),)
)
