"""Decode over latents by aiter's kernels in assembly; other batches are Triton's.

A launch has as many programs as the GPU has compute units, and what each of them reads is worked out on the device
before (:mod:`atom_core.kernels.aiter_work`): the first layer of a step has it worked out for all.

Requests are decoded by aiter where each brings as many tokens as the others, up to four: behind drafts as well. To it
a token is a page, so any size of pages will do.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from atom_core.batch import Batch, capturing
from atom_core.cache import LatentCacheView
from atom_core.kernels.aiter_library import aiter_function, require
from atom_core.kernels.aiter_work import Sizes, Work
from atom_core.kernels.custom_op import custom_op
from atom_core.kernels.mla_attention import MlaAttentionKernel
from atom_core.kernels.mla_attention.spec import MlaAttentionSpec
from atom_core.kernels.mla_attention.token_slots import TokenSlots, token_slots
from atom_core.types import GraphSupport


@dataclass(frozen=True, eq=False)
class Shares:
    """Who reads what, for layers of one shape in one step; see aiter's ``get_mla_metadata_v1``."""

    slots: TokenSlots
    work: Work


class AiterMlaAttention:
    """See :mod:`atom_core.kernels.mla_attention`.

    Args:
        spec: the layer.
        room: heads that a kernel of aiter's has, at least the layer's; queries and results have room for them.
        most_queries: tokens of each request that aiter takes.
        others: for all other batches.
    """

    graph_support: GraphSupport = "always"

    def __init__(self, spec: MlaAttentionSpec, room: int, most_queries: int, others: MlaAttentionKernel) -> None:
        require("aiter.get_mla_metadata_info_v1", "aiter.get_mla_metadata_v1", "aiter.mla.mla_decode_fwd")
        self.spec, self.room, self.most_queries, self.others = spec, room, most_queries, others
        self._scales: dict[tuple[float, torch.device], torch.Tensor] = {}

    def __call__(self, q: torch.Tensor, cache: LatentCacheView, batch: Batch, out: torch.Tensor) -> None:
        """Write the attention of every request's queries to ``out``; also in rows of padded requests that decode."""
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
        longest = batch.max_query_len
        # None has more than the longest, so they have as many each if they have that together.
        if longest > self.most_queries or q.shape[0] != batch.seq_lens.shape[0] * longest:
            self.others(q, cache, batch, out)
            return
        heads = self.spec.latent.num_heads
        queries, answers = self._with_room(q), self._with_room(out)
        if queries is None:
            queries = q.new_empty(q.shape[0], self.room, q.shape[2])
            queries[:, :heads] = q
        kept = out.new_empty(out.shape[0], self.room, out.shape[2]) if answers is None else answers
        assert cache.rows.is_contiguous(), "to aiter a token is a page, behind the one before"
        shares = self._shares(batch, cache)
        slots = shares.slots
        _decode(
            queries,
            cache.rows.view(-1, 1, 1, self.spec.latent.row),
            kept,
            slots.query_starts,
            slots.key_starts,
            slots.slots,
            slots.ones,
            *shares.work,
            self._scale(cache),
            longest,
            self.spec.scale,
        )
        if answers is None:
            out.copy_(kept[:, :heads])

    def _with_room(self, x: torch.Tensor) -> torch.Tensor | None:
        """``x [T, H, numbers]`` with all heads that there is room for; None: there is none."""
        strides = (self.room * x.shape[2], x.shape[2], 1)
        return x.as_strided((x.shape[0], self.room, x.shape[2]), strides) if x.stride() == strides else None

    def _shares(self, batch: Batch, cache: LatentCacheView) -> Shares:
        """Those of the step, made by its first layer."""
        shape = self.spec.latent
        key = (self.room, shape.dtype, shape.cache_dtype, cache.rows.shape[:2], capturing(cache.rows.device))
        if key not in batch.scratch:
            slots = token_slots(batch, batch.max_query_len, cache.rows.shape[0], cache.page_size)
            batch.scratch[key] = self._shared_out(slots)
        shares: Shares = batch.scratch[key]
        return shares

    def _shared_out(self, slots: TokenSlots) -> Shares:
        shape = self.spec.latent
        requests = slots.ones.shape[0]
        sizes = _sizes(requests, slots.queries_each, self.room, shape.dtype, shape.cache_dtype)
        shares = Shares(slots, Work.empty(sizes, slots.ones.device))
        _share_out(
            slots.query_starts,
            slots.key_starts,
            slots.ones,
            self.room,
            slots.queries_each,
            shape.dtype,
            shape.cache_dtype,
            *shares.work,
        )
        return shares

    def _scale(self, cache: LatentCacheView) -> torch.Tensor | None:
        """The scale of an FP8 cache on its device; there is none of another."""
        if cache.rows.itemsize > 1:
            return None
        key = (cache.scale, cache.rows.device)
        if key not in self._scales:
            # What is made while a graph is captured belongs to that graph.
            assert not capturing(cache.rows.device), "warm up before capturing"
            self._scales[key] = torch.tensor([cache.scale], dtype=torch.float32, device=cache.rows.device)
        return self._scales[key]


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _sizes(requests: int, queries_each: int, heads: int, dtype: torch.dtype, cache_dtype: torch.dtype) -> Sizes:
    """Of :class:`Work`."""
    sizes: Sizes = aiter_function("aiter.get_mla_metadata_info_v1")(
        requests, queries_each, heads, dtype, cache_dtype, is_sparse=False, fast_mode=True
    )
    return sizes


@custom_op(
    "aiter_mla_shares",
    lambda *args: None,
    mutates=("pointers", "work_starts", "work", "sum_starts", "sums", "parts"),
)
def _share_out(
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
    sum_starts: torch.Tensor,
    sums: torch.Tensor,
    parts: torch.Tensor,
) -> None:
    aiter_function("aiter.get_mla_metadata_v1")(
        query_starts,
        key_starts,
        ones,
        heads,
        1,
        True,
        # By name: the function that says the sizes has the next two the other way about.
        work_metadata_ptrs=pointers,
        work_info_set=work,
        work_indptr=work_starts,
        reduce_indptr=sum_starts,
        reduce_final_map=sums,
        reduce_partial_map=parts,
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
    sum_starts: torch.Tensor,
    sums: torch.Tensor,
    parts: torch.Tensor,
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
        # As many as there are compute units. Where no number is named, batches of 32 requests and more on gfx950 are
        # read in equal parts of the longest request that there may be instead, by a launch more.
        num_kv_splits=0,
        work_meta_data=pointers,
        work_indptr=work_starts,
        work_info_set=work,
        reduce_indptr=sum_starts,
        reduce_final_map=sums,
        reduce_partial_map=parts,
        kv_scale=cache_scale,
    )
