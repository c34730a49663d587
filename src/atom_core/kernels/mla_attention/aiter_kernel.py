"""Decode over latents by aiter's assembly kernels; Triton runs other batches.

A launch has one program for each compute unit. Metadata on the device (:mod:`atom_core.kernels.aiter_work`) says what
each program reads; the first layer of a step makes it for all layers.

aiter decodes requests with equally many tokens, up to four, as with speculative decoding. To aiter a token is a page,
so the cache may have any page size.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace

import torch

from atom_core.batch import Batch, BatchShape, capturing
from atom_core.cache import LatentCacheView
from atom_core.kernels.aiter_library import aiter_function, require
from atom_core.kernels.aiter_work import Sizes, Work
from atom_core.kernels.compile_keys import attention_keys
from atom_core.kernels.custom_op import custom_op
from atom_core.kernels.mla_attention import MlaAttentionKernel
from atom_core.kernels.mla_attention.spec import MlaAttentionSpec
from atom_core.kernels.mla_attention.token_slots import TokenSlots, token_slots
from atom_core.types import GraphSupport


@dataclass(frozen=True, eq=False)
class Metadata:
    """Which program reads what, for layers of one shape in one step; see aiter's ``get_mla_metadata_v1``."""

    slots: TokenSlots
    work: Work


class AiterMlaAttention:
    """See :mod:`atom_core.kernels.mla_attention`.

    Args:
        spec: the layer.
        heads: heads of aiter's kernel, at least the layer's; the padded heads.
        max_query_len: the most tokens of each request.
        others: the kernel for all other batches.
    """

    graph_support: GraphSupport = "always"

    def __init__(self, spec: MlaAttentionSpec, heads: int, max_query_len: int, others: MlaAttentionKernel) -> None:
        require("aiter.get_mla_metadata_info_v1", "aiter.get_mla_metadata_v1", "aiter.mla.mla_decode_fwd")
        self.spec, self.padded_heads, self.max_query_len, self.others = spec, heads, max_query_len, others
        self._scales: dict[tuple[float, torch.device], torch.Tensor] = {}

    def __call__(self, q: torch.Tensor, cache: LatentCacheView, batch: Batch, out: torch.Tensor) -> None:
        """Write the attention of every request's queries to ``out``; also to rows of padded requests that decode."""
        if not 0 < batch.num_decode_requests < batch.num_requests:
            self._run(q, cache, batch, out)
            return
        decodes, others = batch.decodes_and_others()
        tokens = batch.num_decode_tokens
        self._run(q[:tokens], cache, decodes, out[:tokens])
        self._run(q[tokens:], cache, others, out[tokens:])

    def _run(self, q: torch.Tensor, cache: LatentCacheView, batch: Batch, out: torch.Tensor) -> None:
        if not q.shape[0]:
            return
        query_len = batch.max_query_len
        # No request has more than query_len tokens, so all have as many if the sum says so.
        if query_len > self.max_query_len or q.shape[0] != batch.seq_lens.shape[0] * query_len:
            self.others(q, cache, batch, out)
            return
        heads = self.spec.latent.num_heads
        queries, padded_out = self._padded(q), self._padded(out)
        if queries is None:
            queries = q.new_empty(q.shape[0], self.padded_heads, q.shape[2])
            queries[:, :heads] = q
        target = out.new_empty(out.shape[0], self.padded_heads, out.shape[2]) if padded_out is None else padded_out
        assert cache.rows.is_contiguous(), "aiter reads consecutive tokens as pages"
        metadata = self._metadata(batch, cache)
        slots = metadata.slots
        _decode(
            queries,
            cache.rows.view(-1, 1, 1, self.spec.latent.row),
            target,
            slots.query_starts,
            slots.key_starts,
            slots.slots,
            slots.ones,
            *metadata.work,
            self._scale(cache),
            query_len,
            self.spec.scale,
        )
        if padded_out is None:
            out.copy_(target[:, :heads])

    def attention_compile_keys(self, shape: BatchShape, device: torch.device) -> list[Hashable]:
        """See :class:`atom_core.kernels.compile_keys.AttentionCompileKeys`, of what aiter does not take."""
        others = tuple(new for new in shape.queries if new > self.max_query_len or new != shape.max_query_len)
        return attention_keys(self.others, replace(shape, queries=others), device) if others else []

    def _padded(self, x: torch.Tensor) -> torch.Tensor | None:
        """``x [T, H, width]`` with its padded heads, or None if its memory has none."""
        strides = (self.padded_heads * x.shape[2], x.shape[2], 1)
        return x.as_strided((x.shape[0], self.padded_heads, x.shape[2]), strides) if x.stride() == strides else None

    def _metadata(self, batch: Batch, cache: LatentCacheView) -> Metadata:
        """The step's metadata, made by its first layer."""
        shape = self.spec.latent
        key = (self.padded_heads, shape.dtype, shape.cache_dtype, cache.rows.shape[:2], capturing(cache.rows.device))
        if key not in batch.scratch:
            slots = token_slots(batch, batch.max_query_len, cache.rows.shape[0], cache.page_size)
            batch.scratch[key] = self._make_metadata(slots)
        metadata: Metadata = batch.scratch[key]
        return metadata

    def _make_metadata(self, slots: TokenSlots) -> Metadata:
        shape = self.spec.latent
        requests = slots.ones.shape[0]
        sizes = _sizes(requests, slots.queries_each, self.padded_heads, shape.dtype, shape.cache_dtype)
        metadata = Metadata(slots, Work.empty(sizes, slots.ones.device))
        _fill_metadata(
            slots.query_starts,
            slots.key_starts,
            slots.ones,
            self.padded_heads,
            slots.queries_each,
            shape.dtype,
            shape.cache_dtype,
            *metadata.work,
        )
        return metadata

    def _scale(self, cache: LatentCacheView) -> torch.Tensor | None:
        """The scale of an FP8 cache on its device; None for other caches."""
        if cache.rows.itemsize > 1:
            return None
        key = (cache.scale, cache.rows.device)
        if key not in self._scales:
            # A tensor that is made during a capture belongs to that graph.
            assert not capturing(cache.rows.device), "warm up before capturing"
            self._scales[key] = torch.tensor([cache.scale], dtype=torch.float32, device=cache.rows.device)
        return self._scales[key]


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _sizes(requests: int, queries_each: int, heads: int, dtype: torch.dtype, cache_dtype: torch.dtype) -> Sizes:
    """The sizes of :class:`Work`."""
    sizes: Sizes = aiter_function("aiter.get_mla_metadata_info_v1")(
        requests, queries_each, heads, dtype, cache_dtype, is_sparse=False, fast_mode=True
    )
    return sizes


@custom_op(
    "aiter_mla_metadata",
    lambda *args: None,
    mutates=("pointers", "work_starts", "work", "reduce_starts", "reduce_final", "reduce_partial"),
)
def _fill_metadata(
    query_starts: torch.Tensor,
    key_starts: torch.Tensor,
    ones: torch.Tensor,
    heads: int,
    queries_each: int,
    dtype: torch.dtype,
    cache_dtype: torch.dtype,
    pointers: torch.Tensor,
    work_starts: torch.Tensor,
    work: torch.Tensor,
    reduce_starts: torch.Tensor,
    reduce_final: torch.Tensor,
    reduce_partial: torch.Tensor,
) -> None:
    aiter_function("aiter.get_mla_metadata_v1")(
        query_starts,
        key_starts,
        ones,
        heads,
        1,
        True,
        # By name: the function that returns the sizes has the next two in the opposite order.
        work_metadata_ptrs=pointers,
        work_info_set=work,
        work_indptr=work_starts,
        reduce_indptr=reduce_starts,
        reduce_final_map=reduce_final,
        reduce_partial_map=reduce_partial,
        page_size=1,
        kv_granularity=16,
        max_seqlen_qo=queries_each,
        uni_seqlen_qo=queries_each,
        fast_mode=True,
        dtype_q=dtype,
        dtype_kv=cache_dtype,
    )


@custom_op("aiter_mla_decode", lambda *args: None, mutates=("out",))
def _decode(
    q: torch.Tensor,
    rows: torch.Tensor,
    out: torch.Tensor,
    query_starts: torch.Tensor,
    key_starts: torch.Tensor,
    slots: torch.Tensor,
    ones: torch.Tensor,
    pointers: torch.Tensor,
    work_starts: torch.Tensor,
    work: torch.Tensor,
    reduce_starts: torch.Tensor,
    reduce_final: torch.Tensor,
    reduce_partial: torch.Tensor,
    cache_scale: torch.Tensor | None,
    queries_each: int,
    scale: float,
) -> None:
    aiter_function("aiter.mla.mla_decode_fwd")(
        q,
        rows,
        out,
        query_starts,
        key_starts,
        slots,
        ones,
        queries_each,
        page_size=1,
        sm_scale=scale,
        # 0: one program for each compute unit. Without it, batches of 32 requests and more on gfx950 are split by the
        # longest possible request, with one more launch.
        num_kv_splits=0,
        work_meta_data=pointers,
        work_indptr=work_starts,
        work_info_set=work,
        reduce_indptr=reduce_starts,
        reduce_final_map=reduce_final,
        reduce_partial_map=reduce_partial,
        kv_scale=cache_scale,
    )
