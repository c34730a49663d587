"""All of a decoding layer's attention at once, where every request has one new token: from raw qkv to the output.

:mod:`atom_core.kernels.qk_norm_rope_cache`, then :mod:`atom_core.kernels.attention`, with the same results: the new
key and value are in the cache afterwards. ``qkv``: ``[T, (H + 2K) * D]``; ``out``: ``[T, H, D]``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from atom_core.batch import Batch
from atom_core.cache import KVCacheView
from atom_core.kernels.attention import ATTENTION, TRITON_AND_FLASH_ATTENTION_3, PagedAttentionSpec
from atom_core.kernels.qk_norm_rope import QkvSpec, QkvWeights
from atom_core.kernels.select import Implementation, Op, Target, always
from atom_core.kernels.triton_support import overlaps, why_not_fused
from atom_core.types import SameStepReads


@dataclass(frozen=True)
class DecodeAttentionSpec:
    """One attention layer.

    ``separate`` names the implementation that was chosen for each op by itself: what is fused is Triton's, or what
    :data:`BESIDE` names.
    """

    qkv: QkvSpec
    attention: PagedAttentionSpec
    separate: tuple[tuple[str, str], ...]
    reads: SameStepReads


class DecodeAttentionKernel(Protocol):
    """The call; :meth:`takes` says whether it may be made for a batch."""

    def takes(self, batch: Batch) -> bool:
        """Whether it can run this batch, and in a captured graph every batch that the graph may replay."""

    def __call__(
        self,
        qkv: torch.Tensor,
        positions: torch.Tensor,
        weights: QkvWeights,
        cache: KVCacheView,
        batch: Batch,
        sinks: torch.Tensor | None,
        out: torch.Tensor,
    ) -> None: ...


#: Attention of others that has prompts, mixed batches and several tokens a request while this kernel has decodes. aiter
#: attends to plain pages by Triton too (unified_attention), in two launches behind ours that fills the cache; over
#: shuffled pages it has kernels in assembly, to which decodes stay.
BESIDE = ((ATTENTION.name, TRITON_AND_FLASH_ATTENTION_3), (ATTENTION.name, "aiter"))


def _triton_supports(spec: DecodeAttentionSpec, target: Target) -> str | None:
    return why_not_fused(spec.separate, or_else=BESIDE)


def _build_triton(spec: DecodeAttentionSpec, target: Target) -> DecodeAttentionKernel | None:
    from atom_core.kernels.decode_attention.triton_kernel import TritonDecodeAttention  # needs triton

    return TritonDecodeAttention(spec, nvidia=target.kind == "cuda", overlap=overlaps(target))


#: "separate" is no kernel: the cache is filled, then attention runs.
DECODE_ATTENTION: Op[DecodeAttentionSpec, DecodeAttentionKernel | None] = Op(
    "decode_attention",
    (
        Implementation("triton", _triton_supports, _build_triton),
        Implementation("separate", always, lambda spec, target: None),
    ),
)
