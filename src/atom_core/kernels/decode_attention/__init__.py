"""A layer's attention in one launch, from raw qkv to the output, where every request has one new token.

The result is that of :mod:`atom_core.kernels.qk_norm_rope_cache` followed by :mod:`atom_core.kernels.attention`; the
new keys and values are in the cache afterwards. ``qkv``: ``[T, (H + 2K) * D]``; ``out``: ``[T, H, D]``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from atom_core.batch import Batch, BatchShape
from atom_core.cache import KVCacheView
from atom_core.kernels.attention import ATTENTION, TRITON_AND_FLASH_ATTENTION_3, PagedAttentionSpec
from atom_core.kernels.qk_norm_rope import QkvSpec, QkvWeights
from atom_core.kernels.select import Implementation, Op, Target, always
from atom_core.kernels.triton_support import overlaps, why_not_fused
from atom_core.types import SameStepReads


@dataclass(frozen=True)
class DecodeAttentionSpec:
    """One attention layer.

    ``separate`` has the (op, implementation) selected for the single ops. The fused kernel replaces those of Triton and
    those in :data:`ALSO_REPLACES`.
    """

    qkv: QkvSpec
    attention: PagedAttentionSpec
    separate: tuple[tuple[str, str], ...]
    reads: SameStepReads


class DecodeAttentionKernel(Protocol):
    """The call, for batches for which :meth:`takes` is true."""

    def takes(self, batch: Batch | BatchShape) -> bool:
        """Whether it can run this batch and, during a capture, every batch that the graph can replay."""

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


#: Other implementations that this kernel replaces for decode batches. They run prompts, mixed batches and requests of
#: several tokens. Over plain pages aiter uses Triton too (unified_attention), in two launches after ours that fills the
#: cache. Over shuffled pages aiter's assembly kernels run decodes as well.
ALSO_REPLACES = ((ATTENTION.name, TRITON_AND_FLASH_ATTENTION_3), (ATTENTION.name, "aiter"))


def _triton_supports(spec: DecodeAttentionSpec, target: Target) -> str | None:
    return why_not_fused(spec.separate, or_else=ALSO_REPLACES)


def _build_triton(spec: DecodeAttentionSpec, target: Target) -> DecodeAttentionKernel | None:
    from atom_core.kernels.decode_attention.triton_kernel import TritonDecodeAttention  # needs triton

    nvidia, hopper = target.kind == "cuda", target.is_hopper
    return TritonDecodeAttention(spec, nvidia, overlaps(target), hopper)


#: "separate" is no kernel: two ops fill the cache and run attention.
DECODE_ATTENTION: Op[DecodeAttentionSpec, DecodeAttentionKernel | None] = Op(
    "decode_attention",
    (
        Implementation("triton", _triton_supports, _build_triton),
        Implementation("separate", always, lambda spec, target: None),
    ),
)
