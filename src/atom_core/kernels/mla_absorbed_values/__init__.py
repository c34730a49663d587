"""MLA decode up to each head's values: attention leaves its splits, and the value projection merges them.

The result is that of :mod:`atom_core.kernels.mla_attention` followed by :mod:`atom_core.kernels.head_linear` from
latents to values, up to the rounding in between:

    out[t, h] = sum_p a_p (o_p expand[h]);    a_p: the weight of split p in the softmax

``q``: ``[T, H, L + R]``; ``expand``: ``[H, L, V]``; ``out``: ``[T, H, V]``. It is for few requests of one token each
whose keys are split. The separate ops run other batches.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from atom_core.batch import Batch, BatchShape
from atom_core.cache import LatentCacheView
from atom_core.kernels.attention import TRITON_AND_FLASH_ATTENTION_3
from atom_core.kernels.mla_attention import MLA_ATTENTION
from atom_core.kernels.mla_attention.spec import MlaAttentionSpec
from atom_core.kernels.select import Implementation, Op, Target, always
from atom_core.kernels.triton_support import overlaps, why_not_fused


@dataclass(frozen=True)
class MlaAbsorbedValuesSpec:
    """One attention layer.

    ``separate`` has the (op, implementation) selected for the single ops. The fused kernel replaces Triton's.
    """

    attention: MlaAttentionSpec
    separate: tuple[tuple[str, str], ...]


class MlaAbsorbedValuesKernel(Protocol):
    """The call: ``(q, cache, batch, expand, out)``."""

    def takes(self, num_tokens: int, cache: LatentCacheView, batch: Batch) -> bool:
        """Whether it can run this batch and, during a capture, every batch that the graph can replay."""

    def takes_shape(self, shape: BatchShape, device: torch.device) -> bool:
        """The same of a batch in the warm-up, over pages whose rows are aligned."""

    def __call__(
        self,
        q: torch.Tensor,
        cache: LatentCacheView,
        batch: Batch,
        expand: torch.Tensor,
        out: torch.Tensor,
    ) -> None: ...


#: Another implementation that this kernel replaces for decode batches of few rows.
ALSO_REPLACES = ((MLA_ATTENTION.name, TRITON_AND_FLASH_ATTENTION_3),)


def _triton_supports(spec: MlaAbsorbedValuesSpec, target: Target) -> str | None:
    if reason := why_not_fused(spec.separate, or_else=ALSO_REPLACES):
        return reason
    if not target.is_hopper:
        return "It is for Hopper, whose decode kernel can leave splits unmerged."
    from atom_core.kernels.mla_attention.hopper import LatentDecode  # needs triton, which a CPU may lack

    shape = spec.attention.latent
    return None if LatentDecode.fits(spec.attention) else f"Hopper's decode kernel does not support {shape}."


def _build_triton(spec: MlaAbsorbedValuesSpec, target: Target) -> MlaAbsorbedValuesKernel | None:
    from atom_core.kernels.mla_absorbed_values.triton_kernel import TritonMlaAbsorbedValues

    return TritonMlaAbsorbedValues(spec.attention, overlaps(target))


#: "separate" is no kernel: attention merges its splits, then head_linear runs.
MLA_ABSORBED_VALUES: Op[MlaAbsorbedValuesSpec, MlaAbsorbedValuesKernel | None] = Op(
    "mla_absorbed_values",
    (
        Implementation("triton", _triton_supports, _build_triton),
        Implementation("separate", always, lambda spec, target: None),
    ),
)
