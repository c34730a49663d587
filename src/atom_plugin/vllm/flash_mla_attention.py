"""FlashAttention 3 over latents, which vLLM's CUDA build ships for Hopper, for the decodes that it runs faster.

It is faster where many query rows read one request's latents: 128 heads of a token (data-parallel attention), or fewer
heads of several tokens that are verified. On an H200, 64 requests of 2,048 tokens took 75 us a layer with 128 heads
where our kernel took 112, and 50 us with 16 heads where ours took 44. It is slower for few or short requests, and a
captured graph does not know the lengths that it will replay.
"""

from __future__ import annotations

from collections.abc import Hashable

import torch

from atom_core.batch import Batch, BatchShape, capturing
from atom_core.cache import LatentCacheView
from atom_core.kernels.attention.flash_attention_3 import aligned, why_no_dtypes
from atom_core.kernels.compile_keys import attention_keys
from atom_core.kernels.mla_attention import (
    MlaAttentionKernel,
    MlaAttentionSpec,
    build_triton,
    triton_supports,
)
from atom_core.kernels.select import Target
from atom_core.types import GraphSupport
from atom_plugin.vllm.flash_attention import binding, why_not_here

#: It runs batches of at least so many query rows (heads of a request's tokens) and requests, and of at most so many
#: tokens a request. Longer prompts run outside of graphs, where its call takes more host time than ours.
MIN_ROWS, MIN_REQUESTS, MAX_QUERY_LEN = 64, 8, 8

#: Most splits of one request's latents, as in vLLM's own captured graphs, and the most bytes of their partial results,
#: which vLLM's memory profile does not count.
_MAX_SPLITS, _PARTIAL_BYTES = 32, 256 << 20


def why_no_both_mla(spec: MlaAttentionSpec, target: Target) -> str | None:
    """None where our kernel and FlashAttention 3 both run the layer, else the reason."""
    return triton_supports(spec, target) or why_no_flash_mla_attention(spec, target)


def build_both_mla(spec: MlaAttentionSpec, target: Target) -> MlaAttentionKernel:
    """Our kernel, and FlashAttention 3 for the batches that it runs faster."""
    return DispatchByRows(spec, build_triton(spec, target), FlashMlaAttention3(spec))


def why_no_flash_mla_attention(spec: MlaAttentionSpec, target: Target) -> str | None:
    """None where FlashAttention 3 runs the layer, else the reason."""
    shape = spec.latent
    if reason := why_no_dtypes(target, shape.dtype, shape.cache_dtype):
        return reason
    if (shape.rank, shape.rope_dim) != (512, 64):
        return (
            "FlashAttention 3 has latents of 512 elements with rotated keys of 64, not "
            f"{shape.rank} with {shape.rope_dim}."
        )
    return why_not_here()


class DispatchByRows:
    """Two kernels over the same cache: ``many`` runs batches of many query rows, ``kernel`` the others."""

    def __init__(self, spec: MlaAttentionSpec, kernel: MlaAttentionKernel, many: MlaAttentionKernel) -> None:
        assert kernel.padded_heads == many.padded_heads
        assert kernel.graph_support == many.graph_support
        self.spec, self.kernel, self.many = spec, kernel, many
        self.padded_heads, self.graph_support = kernel.padded_heads, kernel.graph_support

    def __call__(self, q: torch.Tensor, cache: LatentCacheView, batch: Batch, out: torch.Tensor) -> None:
        """Write the attention of every request's queries to ``out``."""
        self._chosen(batch.max_query_len, batch.seq_lens.shape[0])(q, cache, batch, out)

    def attention_compile_keys(self, shape: BatchShape, device: torch.device) -> list[Hashable]:
        """See :class:`atom_core.kernels.compile_keys.AttentionCompileKeys`."""
        return attention_keys(self._chosen(shape.max_query_len, shape.num_requests), shape, device)

    def _chosen(self, queries: int, requests: int) -> MlaAttentionKernel:
        rows = self.spec.latent.num_heads * queries
        many = queries <= MAX_QUERY_LEN and rows >= MIN_ROWS and requests >= MIN_REQUESTS
        return self.many if many else self.kernel


class FlashMlaAttention3:
    """See :class:`atom_core.kernels.mla_attention.MlaAttentionKernel`; it reads the cache by its strides.

    FlashAttention's keys are the rotated keys, its values the latents, and its ``q_v`` the queries in the latents'
    space. The first layer of a step computes the schedule on the GPU, for all layers.
    """

    graph_support: GraphSupport = "always"

    def __init__(self, spec: MlaAttentionSpec) -> None:
        self.attend = binding().flash_attn_varlen_func
        self.schedule = binding().get_scheduler_metadata
        self.spec = spec
        self.padded_heads = spec.latent.num_heads

    def __call__(self, q: torch.Tensor, cache: LatentCacheView, batch: Batch, out: torch.Tensor) -> None:
        """Write the attention of every request's queries to ``out``."""
        assert aligned(cache.rows), "it copies from pages whose address and strides are multiples of 16 bytes"
        rank = self.spec.latent.rank
        schedule, splits = self._scheduled(q, cache, batch)
        rows = cache.rows.unsqueeze(2)  # [pages, page size, one head, L + R]
        self.attend(
            q=q[..., rank:],
            k=rows[..., rank:],
            v=rows[..., :rank],
            q_v=q[..., :rank],
            out=out,
            max_seqlen_q=batch.max_query_len,
            cu_seqlens_q=batch.query_start_loc,
            max_seqlen_k=batch.max_seq_len,
            seqused_k=batch.seq_lens,
            softmax_scale=self.spec.scale,
            causal=batch.causal,
            block_table=batch.pages.table,
            scheduler_metadata=schedule,
            num_splits=splits,
            fa_version=3,
        )

    def _scheduled(self, q: torch.Tensor, cache: LatentCacheView, batch: Batch) -> tuple[torch.Tensor, int]:
        """The step's schedule, and at most how many splits a request has in it."""
        shape = self.spec.latent
        key = ("flash_attention_3", shape, cache.page_size, capturing(q.device))
        if key not in batch.scratch:
            split_bytes = q.shape[0] * shape.num_heads * shape.rank * torch.float32.itemsize
            splits = max(1, min(_MAX_SPLITS, _PARTIAL_BYTES // max(1, split_bytes)))
            schedule = self.schedule(
                batch_size=batch.seq_lens.shape[0],
                max_seqlen_q=batch.max_query_len,
                max_seqlen_k=batch.max_seq_len,
                num_heads_q=shape.num_heads,
                num_heads_kv=1,
                headdim=shape.rope_dim,
                cache_seqlens=batch.seq_lens,
                qkv_dtype=shape.dtype,
                headdim_v=shape.rank,
                cu_seqlens_q=batch.query_start_loc,
                page_size=cache.page_size,
                causal=batch.causal,
                num_splits=splits,
            )
            batch.scratch[key] = schedule, splits
        found: tuple[torch.Tensor, int] = batch.scratch[key]
        return found
