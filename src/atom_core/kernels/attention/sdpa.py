"""Paged attention on a CPU through torch's own attention: one request at a time, over keys gathered from its pages."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from atom_core.kernels.cache_dtypes import as_bytes
from atom_core.metadata import AttentionMetadata, CacheOrder, GraphSupport, KVCacheView

if TYPE_CHECKING:
    from atom_core.kernels.attention import PagedAttentionSpec


class SdpaAttention:
    """See :mod:`atom_core.kernels.attention`; it reads lengths on the host, so no graphs.

    Keys and values of an FP8 cache are widened to the queries' dtype, which is exact; their scales go to the scores and
    to the result.
    """

    order: CacheOrder = "plain"
    graph_support: GraphSupport = "none"

    def __init__(self, spec: PagedAttentionSpec) -> None:
        self.spec = spec

    def plan_key(self) -> str:
        """One for all layers."""
        return "sdpa"

    def plan(self, metadata: AttentionMetadata) -> list[tuple[int, int, int, torch.Tensor]]:
        """For each request with queries: its first and last query, its length, its pages."""
        starts, lengths = metadata.query_start_loc.tolist(), metadata.seq_lens.tolist()
        return [
            (starts[request], starts[request + 1], length, metadata.page_table[request])
            for request, length in enumerate(lengths)
            if starts[request + 1] > starts[request]
        ]

    def __call__(
        self,
        q: torch.Tensor,
        cache: KVCacheView,
        metadata: AttentionMetadata,
        sinks: torch.Tensor | None,
        out: torch.Tensor,
    ) -> None:
        """Write the attention of every request's queries to ``out``."""
        plan = metadata.plans.get(self.plan_key())
        requests = self.plan(metadata) if plan is None else plan
        for begin, end, length, pages in requests:  # type: ignore[attr-defined]
            first = self._first_page(length, end - begin, cache.page_size)
            used = pages[first : -(-length // cache.page_size)]
            left = first * cache.page_size  # tokens that the window has left behind
            keys, values = (self._gather(side, used, length - left, q.dtype) for side in (cache.key, cache.value))
            attended = self._attend(q[begin:end], keys, values, self.spec.scale * cache.k_scale)
            torch.mul(attended, cache.v_scale, out=out[begin:end])

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
        """Which keys each query sees, bool ``[queries, length]``."""
        position = torch.arange(length - num_queries, length)[:, None]
        other = torch.arange(length)[None]
        seen = other <= position
        if self.spec.window is not None:
            seen &= other > position - self.spec.window
        return seen
