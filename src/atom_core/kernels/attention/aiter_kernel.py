"""Paged attention by aiter. :mod:`.aiter_choice` selects the kernel for a batch.

Decoding requests come first in a batch; if the batch counts them, they run in a launch of their own. No length is read
on the host, and :mod:`.aiter_persistent` fills its metadata on the device, so a graph can replay any batch.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Iterator

import torch

from atom_core.batch import Batch, BatchShape, capturing
from atom_core.cache import SHUFFLED, CacheOrder, KVCacheView
from atom_core.kernels.aiter_library import aiter_function, require
from atom_core.kernels.attention import PagedAttentionSpec
from atom_core.kernels.attention.aiter_choice import (
    MHA_BATCH_PREFILL,
    PA_DECODE_GLUON,
    PA_FWD_ASM,
    PA_PERSISTENT,
    Call,
    Choice,
    choose,
    gluon_window,
    inclusive_window,
)
from atom_core.kernels.attention.aiter_persistent import PersistentDecode
from atom_core.kernels.custom_op import custom_op
from atom_core.types import GraphSupport

#: Tokens of a request that one program of the Gluon kernel reads; with a window, one program reads all of them.
_PARTITION, _WINDOWED_PARTITION = 256, 128


class AiterAttention:
    """See :class:`atom_core.kernels.attention.PagedAttentionKernel`."""

    graph_support: GraphSupport = "always"

    def __init__(self, spec: PagedAttentionSpec, order: CacheOrder) -> None:
        require("aiter.mha_batch_prefill_func", "aiter.ops.triton.attention.unified_attention.unified_attention")
        if order == SHUFFLED:
            require("aiter.pa_fwd_asm", "aiter.pa_decode_gluon")
            require("aiter.ops.triton.gluon.pa_decode_gluon.get_recommended_splits")
        self.spec, self.order = spec, order
        self.choose = functools.cache(choose)
        self._scales: dict[tuple[float, float, torch.device], tuple[torch.Tensor, torch.Tensor]] = {}
        self._persistent: PersistentDecode | None = None
        if order == SHUFFLED and spec.cache_dtype.itemsize == 1:
            self._persistent = PersistentDecode(spec.num_heads)

    def attention_compile_keys(self, shape: BatchShape, device: torch.device) -> Iterator[Hashable]:
        """See :class:`atom_core.kernels.compile_keys.AttentionCompileKeys`; aiter's Triton kernels choose by these."""
        yield "queries", (shape.max_query_len - 1).bit_length()
        long = shape.max_seq_len > _PARTITION
        yield "requests", shape.max_query_len == 1, (shape.num_requests - 1).bit_length(), long

    def plan_key(self) -> None:
        """No plan."""
        return

    def plan(self, batch: Batch) -> object:
        """Never called."""
        raise AssertionError("aiter's attention has no plan")

    def scales(self, cache: KVCacheView) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """The scales of an FP8 cache on its device; None for other caches, as kernels would multiply by them."""
        if cache.key.itemsize > 1:
            return None, None
        key = (cache.k_scale, cache.v_scale, cache.key.device)
        if key not in self._scales:
            # A tensor that is made during a capture belongs to that graph.
            assert not capturing(cache.key.device), "warm up before capturing"
            both = torch.tensor([cache.k_scale, cache.v_scale], dtype=torch.float32, device=cache.key.device)
            self._scales[key] = (both[:1].clone(), both[1:].clone())
        return self._scales[key]

    def __call__(
        self,
        q: torch.Tensor,
        cache: KVCacheView,
        batch: Batch,
        sinks: torch.Tensor | None,
        out: torch.Tensor,
    ) -> None:
        """Write the attention of every request's queries to ``out``."""
        cache.expect(self.order, self.spec.cache_dtype)
        if not 0 < batch.num_decode_requests < batch.num_requests:
            self._run(q, cache, batch, sinks, out)
            return
        decodes, others = batch.decodes_and_others()
        tokens = batch.num_decode_tokens
        self._run(q[:tokens], cache, decodes, sinks, out[:tokens])
        self._run(q[tokens:], cache, others, sinks, out[tokens:])

    def call_for(self, cache: KVCacheView, batch: Batch, num_tokens: int) -> Call:
        """What the selection depends on."""
        # No request has more than max_query_len tokens, so all have as many if the sum says so.
        uniform = num_tokens == batch.num_requests * batch.max_query_len
        by_token = True
        if self.order != SHUFFLED:
            by_token = all(
                side.stride(0) >= cache.page_size * side.stride(2) and side.stride(2) >= side.shape[1] * side.stride(1)
                for side in (cache.key, cache.value)
            )
        return Call(self.spec, self.order, cache.page_size, batch.max_query_len, uniform, by_token)

    def chosen(self, cache: KVCacheView, batch: Batch, num_tokens: int) -> Choice:
        """The kernel for a batch."""
        return self.choose(self.call_for(cache, batch, num_tokens))

    def _run(
        self,
        q: torch.Tensor,
        cache: KVCacheView,
        batch: Batch,
        sinks: torch.Tensor | None,
        out: torch.Tensor,
    ) -> None:
        spec = self.spec
        if not len(q):
            return
        max_query_len, lengths, table = batch.max_query_len, batch.seq_lens, batch.pages.table
        starts = batch.query_start_loc
        kernel = self.chosen(cache, batch, len(q)).kernel
        if kernel == PA_FWD_ASM:
            _pa_fwd_asm(q, cache.key, cache.value, table, lengths, starts, max_query_len, out)
            return
        if kernel == PA_PERSISTENT:
            assert self._persistent is not None, "it is for shuffled pages in FP8"
            self._persistent(q, cache, batch, out)
            return
        k_scale, v_scale = self.scales(cache)
        keys, values = cache.key, cache.value
        if kernel == PA_DECODE_GLUON:
            window = gluon_window(spec.window, max_query_len)
            _pa_decode_gluon(
                q, keys, values, lengths, table, spec.scale, max_query_len, k_scale, v_scale, sinks, window, out
            )
            return
        left, right = inclusive_window(spec.window)
        if self.order != SHUFFLED:
            keys, values = keys.transpose(1, 2), values.transpose(1, 2)
        max_seq_len, cap = batch.max_seq_len, spec.soft_cap or 0.0
        if kernel == MHA_BATCH_PREFILL:
            _mha_batch_prefill(
                q, keys, values, starts, table, lengths, max_query_len, max_seq_len, spec.scale, cap, left, right, out
            )
            return
        if len(q) < batch.num_requests:
            # With max_query_len 1 the kernel takes row i as request i's, also of padded requests: past the end of q.
            max_query_len = max(max_query_len, 2)
        _unified_attention(
            q,
            keys,
            values,
            starts,
            max_query_len,
            lengths,
            max_seq_len,
            spec.scale,
            left,
            right,
            table,
            cap,
            k_scale,
            v_scale,
            sinks,
            self.order == SHUFFLED,
            out,
        )


@custom_op("aiter_pa_fwd_asm", lambda *args: None, mutates=("out",))
def _pa_fwd_asm(
    q: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    query_len: int,
    out: torch.Tensor,
) -> None:
    aiter_function("aiter.pa_fwd_asm")(
        q,
        key,
        value,
        page_table,
        seq_lens,
        page_table.stride(0),
        max_qlen=query_len,
        out_=out,
        # Without it aiter runs the kernel for one token a request, whatever max_qlen says.
        qo_indptr=query_start_loc if query_len > 1 else None,
        high_precision=0,  # 1 matches several kernels, and takes the first in an unordered map
    )


@custom_op("aiter_pa_decode_gluon", lambda *args: None, mutates=("out",))
def _pa_decode_gluon(
    q: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    seq_lens: torch.Tensor,
    page_table: torch.Tensor,
    scale: float,
    query_len: int,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    sinks: torch.Tensor | None,
    window: int,
    out: torch.Tensor,
) -> None:
    splits = 1
    if not window:
        splits = aiter_function("aiter.ops.triton.gluon.pa_decode_gluon.get_recommended_splits")(
            seq_lens.shape[0], key.shape[1]
        )
    aiter_function("aiter.pa_decode_gluon")(
        out,
        q,
        key,
        value,
        seq_lens,
        page_table,
        scale,
        query_len,
        splits,
        context_partition_size=_WINDOWED_PARTITION if window else _PARTITION,
        compute_type=q.dtype,
        key_scale=k_scale,
        value_scale=v_scale,
        sinks=sinks,
        sliding_window=window,
    )


@custom_op("aiter_mha_batch_prefill", lambda *args: None, mutates=("out",))
def _mha_batch_prefill(
    q: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    query_start_loc: torch.Tensor,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    max_query_len: int,
    max_seq_len: int,
    scale: float,
    soft_cap: float,
    left: int,
    right: int,
    out: torch.Tensor,
) -> None:
    # With a page table, aiter checks the list of pages and its offsets, but does not read them.
    aiter_function("aiter.mha_batch_prefill_func")(
        q,
        key,
        value,
        query_start_loc,
        query_start_loc,
        page_table,
        max_query_len,
        max_seq_len,
        softmax_scale=scale,
        logits_soft_cap=soft_cap,
        causal=True,
        window_size=(left, right),
        out=out,
        block_table=page_table,
        seqlen_k=seq_lens,
    )


@custom_op("aiter_unified_attention", lambda *args: None, mutates=("out",))
def _unified_attention(
    q: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    query_start_loc: torch.Tensor,
    max_query_len: int,
    seq_lens: torch.Tensor,
    max_seq_len: int,
    scale: float,
    left: int,
    right: int,
    page_table: torch.Tensor,
    soft_cap: float,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    sinks: torch.Tensor | None,
    shuffled: bool,
    out: torch.Tensor,
) -> None:
    aiter_function("aiter.ops.triton.attention.unified_attention.unified_attention")(
        q,
        key,
        value,
        out,
        query_start_loc,
        max_query_len,
        seq_lens,
        max_seq_len,
        scale,
        True,
        (left, right),
        page_table,
        soft_cap,
        None,
        k_scale,
        v_scale,
        sinks=sinks,
        shuffled_kv_cache=shuffled,
    )
