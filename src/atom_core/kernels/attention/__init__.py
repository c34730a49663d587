"""Causal attention over a paged cache: prefill, decode, and batches that mix them.

For request ``r`` with ``n`` cached and new tokens, of which the last ``m`` are queries, query ``i`` (position
``p = n - m + i``) attends to the keys at positions ``max(0, p - window + 1) .. p``:

    s_j = scale * q_i . k_j;  s_j = cap * tanh(s_j / cap) where capped
    o_i = sum_j exp(s_j) v_j / (sum_j exp(s_j) + exp(sink_h))     (the sink term where the layer has sinks)

The cache already has the step's keys and values; an FP8 cache stores them divided by the scales of its view. ``q``,
``out``: ``[T, H, D]``; query head ``h`` reads key/value head ``h // (H / K)``. Rows of ``out`` past the batch's tokens
are not written.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch

from atom_core.batch import Batch
from atom_core.cache import SHUFFLED, CacheOrder, KVCacheView
from atom_core.kernels.aiter_library import FP8, why_no_aiter
from atom_core.kernels.attention.reference import ReferenceAttention
from atom_core.kernels.attention.sdpa import SdpaAttention
from atom_core.kernels.cache_dtypes import FP8_DTYPES, why_unreadable
from atom_core.kernels.select import Implementation, Op, Target, only_on_cpu
from atom_core.kernels.triton_support import overlaps, why_no_triton, why_no_triton_cache
from atom_core.types import GraphSupport

#: An implementation that adapters contribute: FlashAttention 3 for batches with long prompts, Triton for others. See
#: :data:`atom_core.kernels.select.PRIORITY`.
TRITON_AND_FLASH_ATTENTION_3 = "triton_and_flash_attention_3"


@dataclass(frozen=True)
class PagedAttentionSpec:
    """One attention layer over a paged cache, with this rank's heads."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    dtype: torch.dtype
    cache_dtype: torch.dtype
    window: int | None = None
    soft_cap: float | None = None
    sinks: bool = False


class PagedAttentionKernel(Protocol):
    """An attention kernel bound to one layer's spec."""

    order: CacheOrder
    graph_support: GraphSupport

    def plan_key(self) -> Hashable | None:
        """The key of :meth:`plan`'s result in ``Batch.plans``, shared by layers with equal keys. None: no plan."""

    def plan(self, batch: Batch) -> object:
        """What the layers of one key compute once a step."""

    def __call__(
        self,
        q: torch.Tensor,
        cache: KVCacheView,
        batch: Batch,
        sinks: torch.Tensor | None,
        out: torch.Tensor,
    ) -> None: ...


def _aiter_supports(spec: PagedAttentionSpec, target: Target, *, order: CacheOrder = "plain") -> str | None:
    if reason := why_no_aiter(target):
        return reason
    if spec.dtype not in (torch.bfloat16, torch.float16):
        return f"aiter's attention has queries in bfloat16 and float16, not {spec.dtype}."
    if spec.head_dim > 256:
        return f"aiter's attention is used for head sizes up to 256, not {spec.head_dim}."
    if spec.cache_dtype not in (spec.dtype, FP8[target.arch]):
        return (
            f"aiter's attention on {target.arch} has a cache in the model's dtype {spec.dtype} or in "
            f"{FP8[target.arch]}, not {spec.cache_dtype}."
        )
    if order == SHUFFLED and spec.head_dim not in (32, 64, 128, 256):
        return f"aiter's attention over shuffled pages has head sizes 32, 64, 128 and 256, not {spec.head_dim}."
    return None


def _build_aiter(spec: PagedAttentionSpec, target: Target, *, order: CacheOrder = "plain") -> PagedAttentionKernel:
    from atom_core.kernels.attention.aiter_kernel import AiterAttention  # imports aiter when it is built

    return AiterAttention(spec, order)


def _triton_supports(spec: PagedAttentionSpec, target: Target) -> str | None:
    if reason := why_no_triton(target):
        return reason
    if spec.head_dim > 256:
        return f"The Triton kernel has head sizes up to 256, not {spec.head_dim}."
    if spec.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"The Triton kernel has queries in bfloat16, float16 and float32, not {spec.dtype}."
    return why_no_triton_cache(spec.dtype, spec.cache_dtype, target)


def _build_triton(spec: PagedAttentionSpec, target: Target) -> PagedAttentionKernel:
    from atom_core.kernels.attention.triton_kernel import TritonAttention  # needs triton, which a CPU may lack

    nvidia, hopper = target.kind == "cuda", target.is_hopper
    return TritonAttention(spec, nvidia, overlaps(target), hopper)


def _torch_supports(spec: PagedAttentionSpec, target: Target) -> str | None:
    if reason := only_on_cpu(spec, target):
        return reason
    if spec.sinks or spec.soft_cap:
        return "torch's attention has neither sinks nor a soft cap."
    if spec.cache_dtype not in (spec.dtype, *FP8_DTYPES):
        return f"torch's attention has a cache in the model's dtype {spec.dtype} or in FP8, not {spec.cache_dtype}."
    return None


def _reference_supports(spec: PagedAttentionSpec, target: Target) -> str | None:
    return why_unreadable(spec.cache_dtype)


TRITON_ATTENTION: Implementation[PagedAttentionSpec, PagedAttentionKernel] = Implementation(
    "triton", _triton_supports, _build_triton
)

ATTENTION: Op[PagedAttentionSpec, PagedAttentionKernel] = Op(
    "attention",
    (
        Implementation("aiter", _aiter_supports, _build_aiter),
        Implementation(
            "aiter_shuffled", partial(_aiter_supports, order=SHUFFLED), partial(_build_aiter, order=SHUFFLED)
        ),
        TRITON_ATTENTION,
        Implementation("torch", _torch_supports, lambda spec, target: SdpaAttention(spec)),
        Implementation("reference", _reference_supports, lambda spec, target: ReferenceAttention(spec)),
    ),
)
