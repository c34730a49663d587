"""FlashAttention 3 (arXiv 2407.08608) over our pages: what it can run, and what every binding of it is given.

The frameworks ship its kernels for Hopper, each with a binding of its own, which an adapter's subclass calls.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable
from typing import TYPE_CHECKING

import torch

from atom_core.batch import Batch
from atom_core.cache import CacheOrder, KVCacheView
from atom_core.kernels.select import Target
from atom_core.types import GraphSupport

if TYPE_CHECKING:
    from atom_core.kernels.attention import PagedAttentionSpec


def why_no_flash_attention_3(spec: PagedAttentionSpec, target: Target) -> str | None:
    """None where FlashAttention 3 can run the layer, else the reason."""
    if reason := why_no_dtypes(target, spec.dtype, spec.cache_dtype):
        return reason
    if spec.head_dim > 256 or spec.head_dim % 8:
        return f"FlashAttention 3 has head sizes up to 256 that are multiples of 8, not {spec.head_dim}."
    if spec.sinks and spec.dtype != torch.bfloat16:
        return f"FlashAttention 3 has sinks in bfloat16, not in {spec.dtype}."
    if spec.sinks and spec.num_heads > 64:
        return f"FlashAttention 3 has sinks of up to 64 heads, not of {spec.num_heads}."
    return None


def why_no_dtypes(target: Target, dtype: torch.dtype, cache_dtype: torch.dtype) -> str | None:
    """None on Hopper where queries and the cache are in the same 16 bits, else the reason."""
    if not target.is_hopper:
        return f"FlashAttention 3 is written for Hopper (sm90), not for {target}."
    if dtype not in (torch.bfloat16, torch.float16):
        return f"FlashAttention 3 has bfloat16 and float16, not {dtype}."
    if cache_dtype != dtype:
        return f"FlashAttention 3 would want queries in the cache's dtype {cache_dtype} too."
    return None


def aligned(pages: torch.Tensor) -> bool:
    """Whether FlashAttention 3 can copy from these pages, which it does by 16 bytes or by tensor descriptors."""
    return pages.data_ptr() % 16 == 0 and all(stride * pages.itemsize % 16 == 0 for stride in pages.stride()[:-1])


class FlashAttention3(ABC):
    """See :class:`atom_core.kernels.attention.PagedAttentionKernel`; it reads the cache by its strides.

    Each call schedules itself on the GPU, so a captured graph is valid for any lengths. With a window it also reads,
    with no weight, what stands before it in the same block of keys, so pages that have left it must hold finite
    numbers.
    """

    order: CacheOrder = "plain"
    graph_support: GraphSupport = "always"
    #: Prompts have programs enough. Left to the kernel, few of them are shared out, into partial results of up to 1 GB.
    num_splits = 1

    def __init__(self, spec: PagedAttentionSpec) -> None:
        self.scale, self.soft_cap = spec.scale, spec.soft_cap or 0.0
        # How many keys before and after its own position a query sees; -1 is all.
        self.window = (-1, -1) if spec.window is None else (spec.window - 1, 0)

    @abstractmethod
    def attend(
        self,
        q: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        batch: Batch,
        sinks: torch.Tensor | None,
        out: torch.Tensor,
    ) -> None:
        """Call the binding; ``keys`` and ``values`` are ``[pages, page size, kv heads, head dim]``."""

    def plan_key(self) -> Hashable | None:
        """It plans nothing."""
        return None

    def plan(self, batch: Batch) -> object:
        """See :meth:`plan_key`."""
        raise AssertionError("a kernel without a plan_key plans nothing")

    def __call__(
        self,
        q: torch.Tensor,
        cache: KVCacheView,
        batch: Batch,
        sinks: torch.Tensor | None,
        out: torch.Tensor,
    ) -> None:
        """Write the attention of every request's queries to ``out``."""
        assert aligned(cache.key), "it copies from pages whose address and strides are multiples of 16 bytes"
        assert aligned(cache.value)
        if sinks is not None:
            sinks = sinks.to(q.dtype)  # ours are float32, and it takes no others; weights may have been updated
        self.attend(q, cache.key.transpose(1, 2), cache.value.transpose(1, 2), batch, sinks, out)
