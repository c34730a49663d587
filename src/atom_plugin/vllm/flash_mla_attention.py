"""FlashAttention 3 over latents, which vLLM's CUDA build ships for Hopper, where it decodes faster than ours.

That is where many rows meet one request's latents: 128 heads of a token, as each rank has them that shares requests and
not heads, or fewer heads of several tokens that are verified. By itself it took 75 us a layer on an H200 for 64
requests of 2,048 tokens with 128 heads, where ours took 112, but 50 with 16 heads, where ours took 44; of short or few
requests it takes longer, and graphs do not know how long those will be that they replay.
"""

from __future__ import annotations

import torch

from atom_core.batch import Batch, capturing
from atom_core.cache import LatentCacheView
from atom_core.kernels.mla_attention import (
    MlaAttentionKernel,
    MlaAttentionSpec,
    build_triton,
    triton_supports,
)
from atom_core.kernels.select import Target
from atom_core.types import GraphSupport
from atom_plugin.vllm.flash_attention import aligned, binding, why_no_dtypes, why_not_here

#: Rows (heads of a request's tokens) and requests from which on it decodes, and up to how many tokens of a request:
#: longer prompts run outside of graphs, where a call takes the host longer than ours.
MANY_ROWS, FEW_REQUESTS, MOST_QUERIES = 64, 8, 8

#: At most how many programs share a request's rows of latents, as in vLLM's own captured graphs, and how much memory
#: the parts of their answers may take: vLLM has not counted it.
_MOST_PARTS, _PARTS_BYTES = 32, 256 << 20


def why_no_both_over_latents(spec: MlaAttentionSpec, target: Target) -> str | None:
    """None where the layer can be run by ours and by it, else the reason."""
    return triton_supports(spec, target) or why_no_flash_mla_attention(spec, target)


def build_both_over_latents(spec: MlaAttentionSpec, target: Target) -> MlaAttentionKernel:
    """Ours, and FlashAttention 3 where that is faster."""
    return ManyRowsElsewhere(spec, build_triton(spec, target), FlashMlaAttention3(spec))


def why_no_flash_mla_attention(spec: MlaAttentionSpec, target: Target) -> str | None:
    """None where it can run the layer, else the reason."""
    shape = spec.latent
    if reason := why_no_dtypes(target, shape.dtype, shape.cache_dtype):
        return reason
    if (shape.rank, shape.rope_dim) != (512, 64):
        return (
            "FlashAttention 3 has latents of 512 numbers with rotated keys of 64, not "
            f"{shape.rank} with {shape.rope_dim}."
        )
    return why_not_here()


class ManyRowsElsewhere:
    """A kernel that leaves batches to another where many rows meet a request's latents; both read the same cache."""

    def __init__(self, spec: MlaAttentionSpec, kernel: MlaAttentionKernel, many: MlaAttentionKernel) -> None:
        assert kernel.padded_heads == many.padded_heads
        assert kernel.graph_support == many.graph_support
        self.spec, self.kernel, self.many = spec, kernel, many
        self.padded_heads, self.graph_support = kernel.padded_heads, kernel.graph_support

    def __call__(self, q: torch.Tensor, cache: LatentCacheView, batch: Batch, out: torch.Tensor) -> None:
        """Write the attention of every request's queries to ``out``."""
        queries = batch.max_query_len
        rows, requests = self.spec.latent.num_heads * queries, batch.seq_lens.shape[0]
        many = queries <= MOST_QUERIES and rows >= MANY_ROWS and requests >= FEW_REQUESTS
        (self.many if many else self.kernel)(q, cache, batch, out)


class FlashMlaAttention3:
    """See :class:`atom_core.kernels.mla_attention.MlaAttentionKernel`; it reads the cache by its strides.

    Rotated keys are its keys, and what the latents add to the scores its ``q_v``: the latents are its values. Who reads
    what is worked out on the GPU by the first layer of a step, for all of them.
    """

    graph_support: GraphSupport = "always"

    def __init__(self, spec: MlaAttentionSpec) -> None:
        self.attend = binding().flash_attn_varlen_func
        self.schedule = binding().get_scheduler_metadata
        self.spec = spec
        self.padded_heads = spec.latent.num_heads

    def __call__(self, q: torch.Tensor, cache: LatentCacheView, batch: Batch, out: torch.Tensor) -> None:
        """Write the attention of every request's queries to ``out``."""
        assert aligned(cache.rows), "it copies by tensor descriptors, whose strides are multiples of 16 bytes"
        rank = self.spec.latent.rank
        schedule, parts = self._scheduled(q, cache, batch)
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
            num_splits=parts,
            fa_version=3,
        )

    def _scheduled(self, q: torch.Tensor, cache: LatentCacheView, batch: Batch) -> tuple[torch.Tensor, int]:
        """The step's schedule, and at most how many parts a request has in it."""
        shape = self.spec.latent
        key = ("flash_attention_3", shape, cache.page_size, capturing(q.device))
        if key not in batch.scratch:
            part_bytes = q.shape[0] * shape.num_heads * shape.rank * torch.float32.itemsize
            parts = max(1, min(_MOST_PARTS, _PARTS_BYTES // max(1, part_bytes)))
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
                num_splits=parts,
            )
            batch.scratch[key] = schedule, parts
        found: tuple[torch.Tensor, int] = batch.scratch[key]
        return found
