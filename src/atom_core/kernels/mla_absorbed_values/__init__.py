"""Decoding over latents to each head's values, at once: attention leaves its sums in parts, which a product joins.

:mod:`atom_core.kernels.mla_attention`, then :mod:`atom_core.kernels.head_linear` out of latents, with the same
results but for how sums are rounded in between:

    out[t, h] = sum_p a_p (o_p expand[h]);    a_p: the share that the keys of part p have in the softmax

``q``: ``[T, H, L + R]``; ``expand``: ``[H, L, V]``; ``out``: ``[T, H, V]``. It is for few requests of one token each,
whose keys are shared out: others are run by the ops that it is made of.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from atom_core.batch import Batch
from atom_core.cache import LatentCacheView
from atom_core.kernels.attention import TRITON_AND_FLASH_ATTENTION_3
from atom_core.kernels.mla_attention import MLA_ATTENTION
from atom_core.kernels.mla_attention.spec import MlaAttentionSpec
from atom_core.kernels.select import Implementation, Op, Target, always
from atom_core.kernels.triton_support import overlaps, why_not_fused


@dataclass(frozen=True)
class MlaAbsorbedValuesSpec:
    """One attention layer.

    ``separate`` names the implementation that was chosen for each op by itself: what is fused is Triton's.
    """

    attention: MlaAttentionSpec
    separate: tuple[tuple[str, str], ...]


class MlaAbsorbedValuesKernel(Protocol):
    """The call: ``(q, cache, batch, expand, out)``."""

    def takes(self, num_tokens: int, cache: LatentCacheView, batch: Batch) -> bool:
        """Whether it is to be called for this batch, and in a captured graph for every batch that it may replay."""

    def __call__(
        self,
        q: torch.Tensor,
        cache: LatentCacheView,
        batch: Batch,
        expand: torch.Tensor,
        out: torch.Tensor,
    ) -> None: ...


#: Attention of others that has batches of many rows a request while this kernel has decodes of few.
BESIDE = ((MLA_ATTENTION.name, TRITON_AND_FLASH_ATTENTION_3),)


def _triton_supports(spec: MlaAbsorbedValuesSpec, target: Target) -> str | None:
    if reason := why_not_fused(spec.separate, or_else=BESIDE):
        return reason
    if (target.kind, target.arch) != ("cuda", "sm90"):
        return "It is for Hopper, whose kernel for decoding leaves parts."
    from atom_core.kernels.mla_attention.hopper import LatentDecode  # needs triton, which a CPU may lack

    shape = spec.attention.latent
    return None if LatentDecode.fits(spec.attention) else f"Hopper's kernel for decoding does not have {shape}."


def _build_triton(spec: MlaAbsorbedValuesSpec, target: Target) -> MlaAbsorbedValuesKernel | None:
    from atom_core.kernels.mla_absorbed_values.triton_kernel import TritonMlaAbsorbedValues

    return TritonMlaAbsorbedValues(spec.attention, overlaps(target))


#: "separate" is no kernel: attention adds its parts up, then they are multiplied.
MLA_ABSORBED_VALUES: Op[MlaAbsorbedValuesSpec, MlaAbsorbedValuesKernel | None] = Op(
    "mla_absorbed_values",
    (
        Implementation("triton", _triton_supports, _build_triton),
        Implementation("separate", always, lambda spec, target: None),
    ),
)
