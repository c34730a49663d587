"""Paged attention on a CPU by torch's scaled_dot_product_attention, over keys gathered from their pages.

Requests that all decode run together if their lengths are similar, otherwise one by one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch
import torch.nn.functional as F

from atom_core.batch import Batch
from atom_core.cache import CacheOrder, KVCacheView
from atom_core.kernels.cache_dtypes import as_bytes
from atom_core.types import GraphSupport

if TYPE_CHECKING:
    from atom_core.kernels.attention import PagedAttentionSpec


#: All layers share one plan.
PLAN_KEY = "sdpa"


class SdpaAttention:
    """See :mod:`atom_core.kernels.attention`; it reads lengths on the host, so no graphs.

    Keys and values of an FP8 cache are cast to the queries' dtype, which is exact. Their scales multiply the scores and
    the result.
    """

    order: CacheOrder = "plain"
    graph_support: GraphSupport = "none"

    def __init__(self, spec: PagedAttentionSpec) -> None:
        self.spec = spec

    def plan_key(self) -> str:
        """All layers share one plan."""
        return PLAN_KEY

    def plan(self, batch: Batch) -> tuple[list[int], list[int]]:
        """The start of each request's queries and its length, on the host."""
        return batch.query_start_loc.tolist(), batch.seq_lens.tolist()

    def __call__(
        self,
        q: torch.Tensor,
        cache: KVCacheView,
        batch: Batch,
        sinks: torch.Tensor | None,
        out: torch.Tensor,
    ) -> None:
        """Write the attention of every request's queries to ``out``."""
        planned = batch.plans.get(PLAN_KEY)
        starts, lengths = self.plan(batch) if planned is None else cast(tuple[list[int], list[int]], planned)
        if self._alike(starts, lengths):
            keys, values = _by_slot(cache.key), _by_slot(cache.value)
            if keys is not None and values is not None:
                self._decode(q, (keys, values), cache, batch, lengths, out)
                return
        page_size = cache.page_size
        for request, length in enumerate(lengths):
            begin, end = starts[request], starts[request + 1]
            if end == begin:
                continue
            first = self._first_page(length, end - begin, page_size)
            used = batch.pages.table[request, first : -(-length // page_size)]
            left = first * page_size  # tokens before the window
            keys = self._gather(cache.key, used, length - left, q.dtype)
            values = self._gather(cache.value, used, length - left, q.dtype)
            attended = self._attend(q[begin:end], keys, values, self.spec.scale * cache.k_scale)
            torch.mul(attended, cache.v_scale, out=out[begin:end])

    def _width(self, lengths: list[int]) -> int:
        """The most keys that any of these requests attends to."""
        return min(max(lengths), self.spec.window or max(lengths))

    def _alike(self, starts: list[int], lengths: list[int]) -> bool:
        """Whether all requests have one query, and padding to one length at most doubles the number of keys."""
        decode = starts == list(range(len(lengths) + 1))
        return decode and self._width(lengths) * len(lengths) <= 2 * sum(lengths)

    def _decode(
        self,
        q: torch.Tensor,
        sides: tuple[torch.Tensor, torch.Tensor],
        cache: KVCacheView,
        batch: Batch,
        lengths: list[int],
        out: torch.Tensor,
    ) -> None:
        """One query of each request, all at once. Shorter requests repeat their last key, masked."""
        count, width = len(lengths), self._width(lengths)
        ends = batch.seq_lens[:, None].long()
        position = (ends - width).clamp(min=0) + torch.arange(width)
        known = position < ends
        position = torch.minimum(position, ends - 1)
        slots = batch.pages.table.long().gather(1, position // cache.page_size) * cache.page_size
        slots = (slots + position % cache.page_size).flatten()
        keys, values = (
            side.index_select(0, slots).view(cache.key.dtype).view(count, width, -1, self.spec.head_dim).to(q.dtype)
            for side in sides
        )
        # A group's heads are queries of one head: torch's enable_gqa is many times slower for single queries.
        attended = F.scaled_dot_product_attention(
            q[:count].reshape(count, self.spec.num_kv_heads, -1, self.spec.head_dim),
            keys.transpose(1, 2),
            values.transpose(1, 2),
            attn_mask=None if bool(known.all()) else known[:, None, None],
            scale=self.spec.scale * cache.k_scale,
        )
        torch.mul(attended.flatten(1, 2), cache.v_scale, out=out[:count])

    def _first_page(self, length: int, num_queries: int, page_size: int) -> int:
        if self.spec.window is None:
            return 0
        return max(0, length - num_queries - self.spec.window + 1) // page_size

    @staticmethod
    def _gather(side: torch.Tensor, pages: torch.Tensor, length: int, dtype: torch.dtype) -> torch.Tensor:
        """The first ``length`` tokens of the given pages in ``dtype``, ``[1, K, length, D]``."""
        found = as_bytes(side).index_select(0, pages).view(side.dtype)  # [pages, K, page size, D]
        return found.transpose(0, 1).flatten(1, 2)[None, :, :length].to(dtype)

    def _attend(self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float) -> torch.Tensor:
        num_queries, length = q.shape[0], keys.shape[2]
        whole = num_queries == length and self.spec.window is None
        mask = None if whole or (num_queries == 1 and self.spec.window is None) else self._mask(num_queries, length)
        attended = F.scaled_dot_product_attention(
            q.transpose(0, 1)[None],
            keys,
            values,
            attn_mask=mask,
            is_causal=whole and num_queries > 1,
            scale=scale,
            enable_gqa=self.spec.num_heads != self.spec.num_kv_heads,
        )
        return attended[0].transpose(0, 1)

    def _mask(self, num_queries: int, length: int) -> torch.Tensor:
        """The keys that each query sees, bool ``[queries, length]``."""
        position = torch.arange(length - num_queries, length)[:, None]
        other = torch.arange(length)[None]
        seen = other <= position
        if self.spec.window is not None:
            seen &= other > position - self.spec.window
        return seen


def _by_slot(side: torch.Tensor) -> torch.Tensor | None:
    """``[pages, K, page size, D]`` as int64 rows, one for each slot; None if its memory has another order.

    torch copies int64 rows ten times as fast as rows of 16-bit elements.
    """
    by_token = side.transpose(1, 2)
    pages, page_size, heads, dim = by_token.shape
    strides = (page_size * heads * dim, heads * dim, dim, 1)
    for size, stride, wanted in zip(by_token.shape, by_token.stride(), strides, strict=True):
        if size != 1 and stride != wanted:
            return None
    if heads * dim * side.itemsize % 8 or side.storage_offset() * side.itemsize % 8:
        return None
    return by_token.as_strided((pages * page_size, heads * dim), (heads * dim, 1)).view(torch.int64)
