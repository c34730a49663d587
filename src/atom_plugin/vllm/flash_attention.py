"""FlashAttention 3, which vLLM's CUDA build ships for Hopper, as an implementation of the core's attention.

By itself it prefills faster than the core's Triton kernel (arXiv 2407.08608): on an H200, 8,192 tokens of Qwen3 8B in
1.03 ms a layer in place of 1.78. Within an engine a prompt of 4,000 tokens has its first token after 99 ms in place of
106, but one of 128 after 12.7 ms in place of 8.6: a call takes more of the host's time. So batches with a long prompt
are its, and all others the core's kernel's. Decoding alone stays with the core too, where norms, rope and the cache's
filling are fused with it.

Over latents it is to be asked for, with ``ATOM_KERNELS=latent_attention=flash_attention_3``, until an engine has been
measured with it: by itself it decodes 64 requests of 2,048 tokens and 16 heads in 51 us a layer on an H200 in place of
81, 8 with 128 heads in 25 in place of 105. It does all that is not expanded then.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from types import ModuleType
from typing import cast

import torch

from atom_core.kernels.attention import (
    TRITON_AND_FLASH_ATTENTION_3,
    TRITON_ATTENTION,
    PagedAttentionKernel,
    PagedAttentionSpec,
)
from atom_core.kernels.latent_attention import LatentAttentionKernel, LatentAttentionSpec
from atom_core.kernels.select import Implementation, Target
from atom_core.metadata import AttentionMetadata, CacheOrder, GraphSupport, KVCacheView, LatentCacheView, capturing

#: New tokens of a batch's longest prompt from which on it is read by FlashAttention 3: what was measured, and won.
LONG_PROMPT = 4000

#: At most how many programs share a request's rows of latents, as in vLLM's own captured graphs, and how much memory
#: the parts of their answers may take: vLLM has not counted it.
_MOST_PARTS, _PARTS_BYTES = 32, 256 << 20


def gpu_kernels() -> Mapping[str, Implementation[Hashable, object]]:
    """The GPU kernels that vLLM ships and that ours may be exchanged for, by op name."""
    found = {
        "attention": Implementation(TRITON_AND_FLASH_ATTENTION_3, _why_no_both, _build_both),
        "latent_attention": Implementation("flash_attention_3", why_no_flash_latent_attention, _build_of_latents),
    }
    return cast("Mapping[str, Implementation[Hashable, object]]", found)


def _why_no_both(spec: PagedAttentionSpec, target: Target) -> str | None:
    return TRITON_ATTENTION.supports(spec, target) or why_no_flash_attention(spec, target)


def _build_both(spec: PagedAttentionSpec, target: Target) -> PagedAttentionKernel:
    return LongPromptsElsewhere(TRITON_ATTENTION.build(spec, target), FlashAttention3(spec))


def _build_of_latents(spec: LatentAttentionSpec, target: Target) -> LatentAttentionKernel:
    return FlashLatentAttention3(spec)


def why_no_flash_attention(spec: PagedAttentionSpec, target: Target) -> str | None:
    """None where it can run the layer, else the reason."""
    if reason := _why_no_dtypes(target, spec.dtype, spec.cache_dtype):
        return reason
    if spec.head_dim > 256 or spec.head_dim % 8:
        return f"FlashAttention 3 has head sizes up to 256 that are multiples of 8, not {spec.head_dim}."
    if spec.sinks and spec.dtype != torch.bfloat16:
        return f"FlashAttention 3 has sinks in bfloat16, not in {spec.dtype}."
    return _why_not_here()


def why_no_flash_latent_attention(spec: LatentAttentionSpec, target: Target) -> str | None:
    """None where it can run the layer, else the reason."""
    shape = spec.latent
    if reason := _why_no_dtypes(target, shape.dtype, shape.cache_dtype):
        return reason
    if (shape.rank, shape.rope_dim) != (512, 64):
        return (
            "FlashAttention 3 has latents of 512 numbers with rotated keys of 64, not "
            f"{shape.rank} with {shape.rope_dim}."
        )
    return _why_not_here()


def _why_no_dtypes(target: Target, dtype: torch.dtype, cache_dtype: torch.dtype) -> str | None:
    if (target.kind, target.arch) != ("cuda", "sm90"):
        return f"FlashAttention 3 is written for Hopper (sm90), not for {target}."
    if dtype not in (torch.bfloat16, torch.float16):
        return f"FlashAttention 3 has bfloat16 and float16, not {dtype}."
    if cache_dtype != dtype:
        return f"FlashAttention 3 would want queries in the cache's dtype {cache_dtype} too."
    return None


def _why_not_here() -> str | None:
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


def _aligned(pages: torch.Tensor) -> bool:
    return pages.data_ptr() % 16 == 0 and all(stride * pages.itemsize % 16 == 0 for stride in pages.stride()[:-1])


class FlashAttention3:
    """See :class:`atom_core.kernels.attention.PagedAttentionKernel`; it reads the cache by its strides.

    It is scheduled on the GPU within each call, so a captured graph holds for any lengths.
    """

    order: CacheOrder = "plain"
    graph_support: GraphSupport = "always"

    def __init__(self, spec: PagedAttentionSpec) -> None:
        interface = _interface()
        assert isinstance(interface, ModuleType), interface
        self.attend = interface.flash_attn_varlen_func
        self.spec = spec
        # How many keys before and after its own position a query sees; -1 is all.
        self.window = (-1, -1) if spec.window is None else (spec.window - 1, 0)

    def plan_key(self) -> Hashable | None:
        """It plans nothing."""
        return None

    def plan(self, metadata: AttentionMetadata) -> object:
        """See :meth:`plan_key`."""
        raise AssertionError("without a key nothing is planned")

    def __call__(
        self,
        q: torch.Tensor,
        cache: KVCacheView,
        metadata: AttentionMetadata,
        sinks: torch.Tensor | None,
        out: torch.Tensor,
    ) -> None:
        """Write the attention of every request's queries to ``out``."""
        assert _aligned(cache.key), "it copies by tensor descriptors, whose strides are multiples of 16 bytes"
        assert _aligned(cache.value)
        self.attend(
            q=q,
            k=cache.key.transpose(1, 2),
            v=cache.value.transpose(1, 2),
            out=out,
            max_seqlen_q=metadata.max_query_len,
            cu_seqlens_q=metadata.query_start_loc,
            max_seqlen_k=metadata.max_seq_len,
            seqused_k=metadata.seq_lens,
            softmax_scale=self.spec.scale,
            causal=metadata.causal,
            window_size=list(self.window),
            softcap=self.spec.soft_cap or 0.0,
            block_table=metadata.page_table,
            fa_version=3,
            s_aux=sinks,
        )


class LongPromptsElsewhere:
    """A kernel that leaves batches with a long prompt to another; both read the same cache. See :data:`LONG_PROMPT`."""

    order: CacheOrder = "plain"

    def __init__(self, kernel: PagedAttentionKernel, long: PagedAttentionKernel) -> None:
        assert kernel.order == long.order == self.order
        assert long.plan_key() is None, "who plans does not know yet whose batch it is"
        self.kernel, self.long = kernel, long
        self.graph_support: GraphSupport = kernel.graph_support

    def plan_key(self) -> Hashable | None:
        """See :class:`atom_core.kernels.attention.PagedAttentionKernel`."""
        return self.kernel.plan_key()

    def plan(self, metadata: AttentionMetadata) -> object:
        """See :class:`atom_core.kernels.attention.PagedAttentionKernel`."""
        return self.kernel.plan(metadata)

    def __call__(
        self,
        q: torch.Tensor,
        cache: KVCacheView,
        metadata: AttentionMetadata,
        sinks: torch.Tensor | None,
        out: torch.Tensor,
    ) -> None:
        """Write the attention of every request's queries to ``out``."""
        kernel = self.long if metadata.max_query_len >= LONG_PROMPT else self.kernel
        kernel(q, cache, metadata, sinks, out)


class FlashLatentAttention3:
    """See :class:`atom_core.kernels.latent_attention.LatentAttentionKernel`; it reads the cache by its strides.

    Rotated keys are its keys, and what the latents add to the scores its ``q_v``: the latents are its values. Who reads
    what is worked out on the GPU by the first layer of a step, for all of them.
    """

    graph_support: GraphSupport = "always"

    def __init__(self, spec: LatentAttentionSpec) -> None:
        interface = _interface()
        assert isinstance(interface, ModuleType), interface
        self.attend = interface.flash_attn_varlen_func
        self.schedule = interface.get_scheduler_metadata
        self.spec = spec
        self.room = spec.latent.num_heads

    def __call__(self, q: torch.Tensor, cache: LatentCacheView, metadata: AttentionMetadata, out: torch.Tensor) -> None:
        """Write the attention of every request's queries to ``out``."""
        assert _aligned(cache.rows), "it copies by tensor descriptors, whose strides are multiples of 16 bytes"
        rank = self.spec.latent.rank
        schedule, parts = self._scheduled(q, cache, metadata)
        rows = cache.rows.unsqueeze(2)  # [pages, page size, one head, L + R]
        self.attend(
            q=q[..., rank:],
            k=rows[..., rank:],
            v=rows[..., :rank],
            q_v=q[..., :rank],
            out=out,
            max_seqlen_q=metadata.max_query_len,
            cu_seqlens_q=metadata.query_start_loc,
            max_seqlen_k=metadata.max_seq_len,
            seqused_k=metadata.seq_lens,
            softmax_scale=self.spec.scale,
            causal=metadata.causal,
            block_table=metadata.page_table,
            scheduler_metadata=schedule,
            num_splits=parts,
            fa_version=3,
        )

    def _scheduled(
        self, q: torch.Tensor, cache: LatentCacheView, metadata: AttentionMetadata
    ) -> tuple[torch.Tensor, int]:
        """The step's schedule, and at most how many parts a request has in it."""
        shape = self.spec.latent
        key = ("flash_attention_3", shape, cache.page_size, capturing(q.device))
        if key not in metadata.kept:
            part_bytes = q.shape[0] * shape.num_heads * shape.rank * torch.float32.itemsize
            parts = max(1, min(_MOST_PARTS, _PARTS_BYTES // max(1, part_bytes)))
            schedule = self.schedule(
                batch_size=metadata.seq_lens.shape[0],
                max_seqlen_q=metadata.max_query_len,
                max_seqlen_k=metadata.max_seq_len,
                num_heads_q=shape.num_heads,
                num_heads_kv=1,
                headdim=shape.rope_dim,
                cache_seqlens=metadata.seq_lens,
                qkv_dtype=shape.dtype,
                headdim_v=shape.rank,
                cu_seqlens_q=metadata.query_start_loc,
                page_size=cache.page_size,
                causal=metadata.causal,
                num_splits=parts,
            )
            metadata.kept[key] = schedule, parts
        found: tuple[torch.Tensor, int] = metadata.kept[key]
        return found
