"""Paged attention in plain torch: the definition, one request at a time. It reads lengths on the host: no graphs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from atom_core.batch import Batch
from atom_core.cache import CacheOrder, KVCacheView
from atom_core.kernels.cache_dtypes import as_bytes
from atom_core.types import GraphSupport

if TYPE_CHECKING:
    from atom_core.kernels.attention import PagedAttentionSpec


class ReferenceAttention:
    """See :mod:`atom_core.kernels.attention`; float32 arithmetic, rounded once."""

    order: CacheOrder = "plain"
    graph_support: GraphSupport = "none"

    def __init__(self, spec: PagedAttentionSpec) -> None:
        self.spec = spec

    def plan_key(self) -> None:
        """No plan."""
        return

    def plan(self, batch: Batch) -> object:
        """Never called."""
        raise AssertionError("the reference attention has no plan")

    def __call__(
        self,
        q: torch.Tensor,
        cache: KVCacheView,
        batch: Batch,
        sinks: torch.Tensor | None,
        out: torch.Tensor,
    ) -> None:
        """Write the attention of every request's queries to ``out``."""
        cache = cache.as_plain()
        starts = batch.query_start_loc.tolist()
        for request, length in enumerate(batch.seq_lens.tolist()):
            begin, end = starts[request], starts[request + 1]
            if end <= begin:
                continue
            first = 0 if self.spec.window is None else max(0, length - (end - begin) - self.spec.window + 1)
            left = first // cache.page_size  # pages before every query's window
            pages = batch.pages.table[request, left : -(-length // cache.page_size)].long()
            tokens = slice(first - left * cache.page_size, length - left * cache.page_size)
            keys = self._gather(cache.key, pages, tokens) * cache.k_scale
            values = self._gather(cache.value, pages, tokens) * cache.v_scale
            out[begin:end] = self._attend(q[begin:end], keys, values, sinks).to(out.dtype)

    @staticmethod
    def _gather(side: torch.Tensor, pages: torch.Tensor, tokens: slice) -> torch.Tensor:
        """These ``tokens`` of the given pages, float32 ``[tokens, K, D]``."""
        found = as_bytes(side)[pages].view(side.dtype)
        return found.transpose(1, 2).flatten(0, 1)[tokens].float()

    def _attend(
        self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, sinks: torch.Tensor | None
    ) -> torch.Tensor:
        num_queries, length = q.shape[0], keys.shape[0]
        group = self.spec.num_heads // self.spec.num_kv_heads
        keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
        scores = torch.einsum("qhd,khd->hqk", q.float(), keys) * self.spec.scale
        if self.spec.soft_cap:
            scores = self.spec.soft_cap * torch.tanh(scores / self.spec.soft_cap)
        position = torch.arange(length - num_queries, length, device=q.device)[:, None]
        other = torch.arange(length, device=q.device)[None]
        hidden = other > position
        if self.spec.window is not None:
            hidden |= other <= position - self.spec.window
        scores = scores.masked_fill(hidden, float("-inf"))
        if sinks is not None:
            column = sinks.float()[:, None, None].expand(-1, num_queries, 1)
            weights = torch.cat((scores, column), dim=-1).softmax(-1)[..., :-1]
        else:
            weights = scores.softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, values)
