"""Decoding by aiter's ``pa_persistent_fwd``: one program for each compute unit, each with its share of the pages.

Metadata on the device (:mod:`atom_core.kernels.aiter_work`) says which pages of which request and key head a program
reads. The first layer of a step makes it for all layers of the same shape. The kernel takes a scale for each page and
key head; our caches have one scale, which is repeated.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from atom_core.batch import Batch, capturing
from atom_core.cache import KVCacheView
from atom_core.kernels.aiter_library import aiter_enum, aiter_function, require
from atom_core.kernels.aiter_work import Sizes, Work
from atom_core.kernels.custom_op import custom_op

#: The kernels' kind of scale by page size in tokens.
_QUANTIZED = {256: "per_256x128", 1024: "per_1024x128"}


@dataclass(frozen=True, eq=False)
class Metadata:
    """Which program reads what, for layers of one shape in one step; see aiter's ``get_pa_metadata_v1``."""

    page_starts: torch.Tensor
    """int32 ``[R + 1]``: request ``r`` has the pages ``page_starts[r] .. page_starts[r + 1] - 1`` of ``pages``."""
    pages: torch.Tensor
    work: Work


class PersistentDecode:
    """Attention over one layer's cache of requests with equally many tokens; ``heads`` is the number of query heads."""

    def __init__(self, heads: int) -> None:
        require("aiter.get_pa_metadata_info_v1", "aiter.get_pa_metadata_v1", "aiter.pa_persistent_fwd")
        self.heads = heads
        self._scales: tuple[KVCacheView, torch.Tensor, torch.Tensor] | None = None

    def __call__(self, q: torch.Tensor, cache: KVCacheView, batch: Batch, out: torch.Tensor) -> None:
        """Write to ``out``; :mod:`.aiter_choice` has selected this kernel for the batch."""
        if self._scales is None or self._scales[0] is not cache:
            self._scales = (cache, *_scales_of_pages(cache))
        it = _metadata(batch, cache, self.heads)
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
    """``page_starts`` and ``pages`` of :class:`Metadata`: the page table without the entries after each last page.

    It does not wait for the host, and its shapes depend on the table's only, so a graph can replay it.
    """
    table = batch.pages.table
    counts = (batch.seq_lens + (page_size - 1)) // page_size
    starts = torch.zeros(len(counts) + 1, dtype=torch.int32, device=table.device)
    torch.cumsum(counts, 0, dtype=torch.int32, out=starts[1:])
    place = torch.arange(table.shape[1], dtype=torch.int32, device=table.device)
    # Entries after the last page go to one more element, which is dropped.
    to = torch.where(place < counts[:, None], starts[:-1, None] + place, table.numel())
    pages = torch.zeros(table.numel() + 1, dtype=torch.int32, device=table.device)
    return starts, pages.scatter_(0, to.flatten().long(), table.flatten())[:-1]


def _metadata(batch: Batch, cache: KVCacheView, heads: int) -> Metadata:
    """The step's metadata, made by its first layer; ``heads`` is the number of query heads."""
    kv_heads = cache.key.shape[1]
    key = ("pa_persistent_fwd", heads, kv_heads, cache.page_size, capturing(cache.key.device))
    if key not in batch.scratch:
        batch.scratch[key] = _make_metadata(batch, cache.page_size, heads // kv_heads, kv_heads)
    found: Metadata = batch.scratch[key]
    return found


def _make_metadata(batch: Batch, page_size: int, group: int, kv_heads: int) -> Metadata:
    requests, device = len(batch.seq_lens), batch.seq_lens.device
    made = Metadata(*_packed_pages(batch, page_size), Work.empty(_sizes(requests, kv_heads), device))
    _fill_metadata(
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
    # A tensor that is made during a capture belongs to that graph.
    assert not capturing(cache.key.device), "warm up before capturing"
    keys, values = (
        torch.full(cache.key.shape[:2], scale, dtype=torch.float32, device=cache.key.device)
        for scale in (cache.k_scale, cache.v_scale)
    )
    return keys, values


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _sizes(requests: int, kv_heads: int) -> Sizes:
    """The sizes of :class:`Work`."""
    sizes: Sizes = aiter_function("aiter.get_pa_metadata_info_v1")(requests, kv_heads)
    return sizes


@custom_op(
    "aiter_pa_metadata",
    lambda *args: None,
    mutates=("pointers", "work_starts", "work", "reduce_starts", "reduce_final", "reduce_partial"),
)
def _fill_metadata(
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
    reduce_starts: torch.Tensor,
    reduce_final: torch.Tensor,
    reduce_partial: torch.Tensor,
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
        reduce_starts,
        reduce_final,
        reduce_partial,
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
    reduce_starts: torch.Tensor,
    reduce_final: torch.Tensor,
    reduce_partial: torch.Tensor,
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
        reduce_starts,
        reduce_final,
        reduce_partial,
        K_QScale=k_scale,
        V_QScale=v_scale,
        mask=1,  # no kernel supports the default
        quant_type=aiter_enum("QuantType", quantized),
    )
