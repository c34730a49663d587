"""Attention over latents in plain torch: the definition, one request at a time. It reads lengths on the host."""

from __future__ import annotations

import torch

from atom_core.batch import Batch
from atom_core.cache import LatentCacheView
from atom_core.kernels.cache_dtypes import as_bytes
from atom_core.kernels.mla_attention.spec import MlaAttentionSpec
from atom_core.types import GraphSupport


class ReferenceMlaAttention:
    """See :mod:`atom_core.kernels.mla_attention`; float32 arithmetic, rounded once."""

    graph_support: GraphSupport = "none"

    def __init__(self, spec: MlaAttentionSpec) -> None:
        self.spec = spec
        self.padded_heads = spec.latent.num_heads

    def __call__(self, q: torch.Tensor, cache: LatentCacheView, batch: Batch, out: torch.Tensor) -> None:
        """Write the attention of every request's queries to ``out``."""
        starts = batch.query_start_loc.tolist()
        for request, length in enumerate(batch.seq_lens.tolist()):
            begin, end = starts[request], starts[request + 1]
            if end <= begin:
                continue
            rows = cached_rows(cache, batch.pages.table[request], length)
            scores = torch.einsum("qhd,kd->hqk", q[begin:end].float(), rows) * self.spec.scale
            weights = scores.masked_fill(unseen(end - begin, length, q.device), float("-inf")).softmax(-1)
            summed = torch.einsum("hqk,kl->qhl", weights, rows[:, : self.spec.latent.rank])
            out[begin:end] = summed.to(out.dtype)


def cached_rows(cache: LatentCacheView, pages: torch.Tensor, length: int) -> torch.Tensor:
    """The rows of the first ``length`` tokens in ``pages``, float32 ``[length, L + R]``."""
    used = pages[: -(-length // cache.page_size)].long()
    found = as_bytes(cache.rows)[used].view(cache.rows.dtype)
    return found.flatten(0, 1)[:length].float() * cache.scale


def unseen(num_queries: int, length: int, device: torch.device) -> torch.Tensor:
    """The keys that each of the last ``num_queries`` tokens does not see, bool ``[queries, length]``."""
    position = torch.arange(length - num_queries, length, device=device)[:, None]
    return torch.arange(length, device=device)[None] > position
