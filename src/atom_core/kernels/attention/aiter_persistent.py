"""Decoding by aiter's ``pa_persistent_fwd``: as many programs as there are compute units, each with its share of pages.

What each reads is worked out on the device before (:mod:`atom_core.kernels.aiter_work`), once a step for all layers of
one shape: runs of a request's pages for each head of keys.

It has a scale for each page and head of keys, and our caches one for all: the same number for each.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from atom_core.batch import Batch, capturing
from atom_core.cache import KVCacheView
from atom_core.kernels.aiter_library import aiter_enum, aiter_function, require
from atom_core.kernels.aiter_work import Sizes, Work
from atom_core.kernels.custom_op import custom_op

#: The kinds of scales that there are kernels for, by the tokens of a page.
_QUANTIZED = {256: "per_256x128", 1024: "per_1024x128"}


@dataclass(frozen=True, eq=False)
class Shares:
    """Who reads what, for layers of one shape in one step; see aiter's ``get_pa_metadata_v1``."""

    page_starts: torch.Tensor
    """int32 ``[R + 1]``: request ``r`` has the pages ``page_starts[r] .. page_starts[r + 1] - 1`` of ``pages``."""
    pages: torch.Tensor
    work: Work


class PersistentDecode:
    """Attention of requests that bring as many tokens each, over one layer's cache; ``heads`` are its queries'."""

    def __init__(self, heads: int) -> None:
        require("aiter.get_pa_metadata_info_v1", "aiter.get_pa_metadata_v1", "aiter.pa_persistent_fwd")
        self.heads = heads
        self._scales: tuple[KVCacheView, torch.Tensor, torch.Tensor] | None = None

    def __call__(self, q: torch.Tensor, cache: KVCacheView, batch: Batch, out: torch.Tensor) -> None:
        """Write to ``out``; the batch is one that :mod:`.aiter_choice` has named it for."""
        if self._scales is None or self._scales[0] is not cache:
            self._scales = (cache, *_scales_of_pages(cache))
        it = _shares(batch, cache, self.heads)
        _pa_persistent(
            q,
            cache.key,
            cache.value,
            *self._scales[1:],
            batch.query_start_loc,
            it.page_starts,
            it.pages,
            batch.seq_lens,
            *it.work[1:],
            batch.max_query_len,
            _QUANTIZED[cache.page_size],
            out,
        )


def _packed_pages(batch: Batch, page_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """``page_starts`` and ``pages`` of :class:`Shares`: the page table without what is behind each request's last page.

    Nothing of it waits for the host, and shapes are those of the table, so a graph may replay it.
    """
    table = batch.page_table
    counts = (batch.seq_lens + (page_size - 1)) // page_size
    starts = torch.zeros(len(counts) + 1, dtype=torch.int32, device=table.device)
    torch.cumsum(counts, 0, dtype=torch.int32, out=starts[1:])
    place = torch.arange(table.shape[1], dtype=torch.int32, device=table.device)
    # What is behind goes to one more place, which nobody reads.
    to = torch.where(place < counts[:, None], starts[:-1, None] + place, table.numel())
    pages = torch.zeros(table.numel() + 1, dtype=torch.int32, device=table.device)
    return starts, pages.scatter_(0, to.flatten().long(), table.flatten())[:-1]


def _shares(batch: Batch, cache: KVCacheView, heads: int) -> Shares:
    """Those of the step, made by its first layer; ``heads`` are queries'."""
    kv_heads = cache.key.shape[1]
    key = ("pa_persistent_fwd", heads, kv_heads, cache.page_size, capturing(cache.key.device))
    if key not in batch.scratch:
        batch.scratch[key] = _shared_out(batch, cache.page_size, heads // kv_heads, kv_heads)
    found: Shares = batch.scratch[key]
    return found


def _shared_out(batch: Batch, page_size: int, group: int, kv_heads: int) -> Shares:
    requests, device = len(batch.seq_lens), batch.seq_lens.device
    made = Shares(*_packed_pages(batch, page_size), Work.empty(_sizes(requests, kv_heads), device))
    _share_out(
        batch.query_start_loc,
        made.page_starts,
        batch.seq_lens,
        group,
        kv_heads,
        page_size,
        batch.max_query_len,
        *made.work,
    )
    return made


def _scales_of_pages(cache: KVCacheView) -> tuple[torch.Tensor, torch.Tensor]:
    """The scales of keys and of values: float32 ``[pages, kv heads]`` each."""
    # What is made while a graph is captured belongs to that graph.
    assert not capturing(cache.key.device), "warm up before capturing"
    keys, values = (
        torch.full(cache.key.shape[:2], scale, dtype=torch.float32, device=cache.key.device)
        for scale in (cache.k_scale, cache.v_scale)
    )
    return keys, values


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _sizes(requests: int, kv_heads: int) -> Sizes:
    """Of :class:`Work`."""
    sizes: Sizes = aiter_function("aiter.get_pa_metadata_info_v1")(requests, kv_heads)
    return sizes


@custom_op(
    "aiter_pa_shares",
    lambda *args: None,
    mutates=("pointers", "work_starts", "work", "sum_starts", "sums", "parts"),
)
def _share_out(
    query_starts: torch.Tensor,
    page_starts: torch.Tensor,
    seq_lens: torch.Tensor,
    group: int,
    kv_heads: int,
    page_size: int,
    queries_each: int,
    pointers: torch.Tensor,
    work_starts: torch.Tensor,
    work: torch.Tensor,
    sum_starts: torch.Tensor,
    sums: torch.Tensor,
    parts: torch.Tensor,
) -> None:
    aiter_function("aiter.get_pa_metadata_v1")(
        query_starts,
        page_starts,
        seq_lens,
        group,
        kv_heads,
        True,
        pointers,
        work_starts,
        work,
        sum_starts,
        sums,
        parts,
        kv_granularity=page_size,
        block_size=page_size,
        max_seqlen_qo=queries_each,
        uni_seqlen_qo=queries_each,
    )


@custom_op("aiter_pa_persistent", lambda *args: None, mutates=("out",))
def _pa_persistent(
    q: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
    query_starts: torch.Tensor,
    page_starts: torch.Tensor,
    pages: torch.Tensor,
    seq_lens: torch.Tensor,
    work_starts: torch.Tensor,
    work: torch.Tensor,
    sum_starts: torch.Tensor,
    sums: torch.Tensor,
    parts: torch.Tensor,
    queries_each: int,
    quantized: str,
    out: torch.Tensor,
) -> None:
    aiter_function("aiter.pa_persistent_fwd")(
        q,
        key,
        value,
        out,
        queries_each,
        query_starts,
        page_starts,
        pages,
        seq_lens,
        work_starts,
        work,
        sum_starts,
        sums,
        parts,
        K_QScale=k_scale,
        V_QScale=v_scale,
        mask=1,  # there is no kernel for its default
        quant_type=aiter_enum("QuantType", quantized),
    )
