"""FlashAttention 3, which vLLM's CUDA build ships for Hopper, as an implementation of the core's attention.

Its kernel prefills faster than the core's (arXiv 2407.08608): on an H200, a layer of Qwen3 8B takes 170 us for eight
prompts of 1,024 tokens, with the core's 240; 866 and 1,469 for one of 8,192; 340 and 399 for 200 requests that decode
beside a chunk of 1,024. But a call takes the host some 0.1 ms longer, which a step of few tokens waits for, and prompts
of a few hundred tokens take the core's kernel less. :class:`DispatchByPrompts` chooses. Steps without a prompt stay
with the core, which fuses norms, rope and the cache write with attention.
"""

from __future__ import annotations

from collections.abc import Hashable
from types import ModuleType
from typing import cast

import torch

from atom_core.batch import Batch, BatchShape
from atom_core.cache import CacheOrder, KVCacheView
from atom_core.kernels.attention import (
    TRITON_ATTENTION,
    PagedAttentionKernel,
    PagedAttentionSpec,
)
from atom_core.kernels.compile_keys import attention_keys
from atom_core.kernels.select import Target
from atom_core.kernels.triton_support import cdiv
from atom_core.types import GraphSupport

#: FlashAttention 3 runs batches in which some request has at least so many new tokens.
LONG_PROMPT = 4000
#: It also runs those of a layer without a window in which some request has at least so many, with heads of 128 and more
#: or with smaller ones, if the batch has enough tokens for the GPU to take longer than the host: a layer's products
#: grow with tokens x (heads x head size)^2, and 1,024 tokens of 32 heads of 128 are enough.
MIN_PROMPT, MIN_PROMPT_OF_SMALL_HEADS = 512, 2048
MIN_WORK = 1024 * (32 * 128) ** 2


def why_no_both(spec: PagedAttentionSpec, target: Target) -> str | None:
    """None where our kernel and FlashAttention 3 both run the layer, else the reason."""
    return TRITON_ATTENTION.supports(spec, target) or why_no_flash_attention(spec, target)


def build_both(spec: PagedAttentionSpec, target: Target) -> PagedAttentionKernel:
    """Our kernel, and FlashAttention 3 for the batches that it runs faster."""
    return DispatchByPrompts(spec, TRITON_ATTENTION.build(spec, target), FlashAttention3(spec))


def why_no_flash_attention(spec: PagedAttentionSpec, target: Target) -> str | None:
    """None where FlashAttention 3 runs the layer, else the reason."""
    if reason := why_no_dtypes(target, spec.dtype, spec.cache_dtype):
        return reason
    if spec.head_dim > 256 or spec.head_dim % 8:
        return f"FlashAttention 3 has head sizes up to 256 that are multiples of 8, not {spec.head_dim}."
    if spec.sinks and spec.dtype != torch.bfloat16:
        return f"FlashAttention 3 has sinks in bfloat16, not in {spec.dtype}."
    if spec.sinks and spec.num_heads > 64:
        return f"FlashAttention 3 has sinks of up to 64 heads, not of {spec.num_heads}."
    return why_not_here()


def why_no_dtypes(target: Target, dtype: torch.dtype, cache_dtype: torch.dtype) -> str | None:
    """None on Hopper where queries and the cache are in the same 16 bits, else the reason."""
    if not target.is_hopper:
        return f"FlashAttention 3 is written for Hopper (sm90), not for {target}."
    if dtype not in (torch.bfloat16, torch.float16):
        return f"FlashAttention 3 has bfloat16 and float16, not {dtype}."
    if cache_dtype != dtype:
        return f"FlashAttention 3 would want queries in the cache's dtype {cache_dtype} too."
    return None


def why_not_here() -> str | None:
    """None where vLLM's binding says that FlashAttention 3 runs on this machine, else the reason."""
    interface = _interface()
    if isinstance(interface, str):
        return interface
    if not interface.is_fa_version_supported(3):
        return f"FlashAttention 3 cannot run here: {interface.fa_version_unsupported_reason(3)}"
    return None


def _interface() -> ModuleType | str:
    """vLLM's binding, or why there is none."""
    try:
        from vllm.vllm_flash_attn import flash_attn_interface
    except ImportError as error:
        return f"vLLM's FlashAttention cannot be imported: {error}"
    return cast(ModuleType, flash_attn_interface)


def binding() -> ModuleType:
    """vLLM's binding; call it where :func:`why_not_here` gives None."""
    interface = _interface()
    assert isinstance(interface, ModuleType), interface
    return interface


def aligned(pages: torch.Tensor) -> bool:
    """Whether FlashAttention 3 can copy from these pages by tensor descriptors."""
    return pages.data_ptr() % 16 == 0 and all(stride * pages.itemsize % 16 == 0 for stride in pages.stride()[:-1])


class FlashAttention3:
    """See :class:`atom_core.kernels.attention.PagedAttentionKernel`; it reads the cache by its strides.

    Each call schedules itself on the GPU, so a captured graph is valid for any lengths.
    """

    order: CacheOrder = "plain"
    graph_support: GraphSupport = "always"

    def __init__(self, spec: PagedAttentionSpec) -> None:
        self.attend = binding().flash_attn_varlen_func
        self.spec = spec
        # How many keys before and after its own position a query sees; -1 is all.
        self.window = (-1, -1) if spec.window is None else (spec.window - 1, 0)

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
        assert aligned(cache.key), "it copies by tensor descriptors, whose strides are multiples of 16 bytes"
        assert aligned(cache.value)
        if sinks is not None:
            sinks = sinks.to(q.dtype)  # ours are float32, and it takes no others; weights may have been updated
        self.attend(
            q=q,
            k=cache.key.transpose(1, 2),
            v=cache.value.transpose(1, 2),
            out=out,
            max_seqlen_q=batch.max_query_len,
            cu_seqlens_q=batch.query_start_loc,
            max_seqlen_k=batch.max_seq_len,
            seqused_k=batch.seq_lens,
            softmax_scale=self.spec.scale,
            causal=batch.causal,
            window_size=list(self.window),
            softcap=self.spec.soft_cap or 0.0,
            block_table=batch.pages.table,
            fa_version=3,
            s_aux=sinks,
            # Prompts have programs enough. Left to it, few of them are shared out, into partial results of up to 1 GB.
            num_splits=1,
        )


class DispatchByPrompts:
    """Two kernels over the same cache: ``long`` runs batches with long prompts, see :data:`LONG_PROMPT`."""

    order: CacheOrder = "plain"

    def __init__(self, spec: PagedAttentionSpec, kernel: PagedAttentionKernel, long: PagedAttentionKernel) -> None:
        assert kernel.order == long.order == self.order
        assert long.plan_key() is None, "a plan is made before the kernel is chosen"
        self.kernel, self.long = kernel, long
        self.graph_support: GraphSupport = kernel.graph_support
        few = MIN_PROMPT if spec.head_dim >= 128 else MIN_PROMPT_OF_SMALL_HEADS
        self.min_prompt = few if spec.window is None else LONG_PROMPT
        self.min_tokens = cdiv(MIN_WORK, (spec.num_heads * spec.head_dim) ** 2)

    def chosen(self, batch: Batch | BatchShape) -> PagedAttentionKernel:
        """The kernel that runs a batch."""
        longest = batch.max_query_len
        enough = longest >= self.min_prompt and batch.num_tokens >= self.min_tokens
        return self.long if longest >= LONG_PROMPT or enough else self.kernel

    def attention_compile_keys(self, shape: BatchShape, device: torch.device) -> list[Hashable]:
        """See :class:`atom_core.kernels.compile_keys.AttentionCompileKeys`."""
        return attention_keys(self.chosen(shape), shape, device)

    def plan_key(self) -> Hashable | None:
        """See :class:`atom_core.kernels.attention.PagedAttentionKernel`."""
        return self.kernel.plan_key()

    def plan(self, batch: Batch) -> object:
        """See :class:`atom_core.kernels.attention.PagedAttentionKernel`."""
        return self.kernel.plan(batch)

    def __call__(
        self,
        q: torch.Tensor,
        cache: KVCacheView,
        batch: Batch,
        sinks: torch.Tensor | None,
        out: torch.Tensor,
    ) -> None:
        """Write the attention of every request's queries to ``out``."""
        self.chosen(batch)(q, cache, batch, sinks, out)
