"""MLA decode of the only token of the only request, from its raw query and latent to each head's values.

The result is that of :mod:`atom_core.kernels.mla_absorbed_queries` followed by
:mod:`atom_core.kernels.mla_absorbed_values`, up to the rounding in between:

    out[0, h] = sum_k softmax_k(q[h, :N] expand[h, :N] row_k[:L] + rotate(q[h, N:]) row_k[L:]) row_k[:L] expand[h, N:]

``q``: ``[1, H, N + R]``; ``latent``: ``[1, L + R]``, whose row goes to the cache; ``out``: ``[1, H, V]``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from atom_core.batch import Batch, BatchShape
from atom_core.cache import LatentCacheView
from atom_core.kernels.mla_attention.spec import MlaAttentionSpec
from atom_core.kernels.mla_cache import MlaWeights
from atom_core.kernels.select import Implementation, Op, Target, always
from atom_core.kernels.triton_support import overlaps, why_not_fused


@dataclass(frozen=True)
class MlaFusedDecodeSpec:
    """One attention layer.

    ``separate`` has the (op, implementation) selected for the single ops. The fused kernel replaces Triton's.
    """

    attention: MlaAttentionSpec
    separate: tuple[tuple[str, str], ...]


class MlaFusedDecodeKernel(Protocol):
    """The call: ``(q, latent, positions [1], weights, cache, slots [1], batch, out)``."""

    def takes(self, num_tokens: int, cache: LatentCacheView, batch: Batch) -> bool:
        """Whether it can run this batch and, during a capture, every batch that the graph can replay."""

    def takes_shape(self, shape: BatchShape, device: torch.device) -> bool:
        """The same of a batch in the warm-up, over pages whose rows are aligned."""

    def __call__(
        self,
        q: torch.Tensor,
        latent: torch.Tensor,
        positions: torch.Tensor,
        weights: MlaWeights,
        cache: LatentCacheView,
        slots: torch.Tensor,
        batch: Batch,
        out: torch.Tensor,
    ) -> None: ...


def _triton_supports(spec: MlaFusedDecodeSpec, target: Target) -> str | None:
    if reason := why_not_fused(spec.separate):
        return reason  # mla_absorbed_values is for Hopper only
    from atom_core.kernels.mla_fused_decode.hopper import MlaFusedDecode  # needs triton, which a CPU may lack

    shape = spec.attention.latent
    return None if MlaFusedDecode.fits(spec.attention) else f"Hopper's kernel for one token does not support {shape}."


def _build_triton(spec: MlaFusedDecodeSpec, target: Target) -> MlaFusedDecodeKernel | None:
    from atom_core.kernels.mla_fused_decode.hopper import MlaFusedDecode

    return MlaFusedDecode(spec.attention, overlaps(target))


#: "separate" is no kernel: mla_absorbed_queries and mla_absorbed_values run.
MLA_FUSED_DECODE: Op[MlaFusedDecodeSpec, MlaFusedDecodeKernel | None] = Op(
    "mla_fused_decode",
    (
        Implementation("triton", _triton_supports, _build_triton),
        Implementation("separate", always, lambda spec, target: None),
    ),
)
