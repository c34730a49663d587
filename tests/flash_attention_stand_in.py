"""What a binding of FlashAttention 3 is asked for, worked out by the reference; it stands in for a GPU's kernel."""

from __future__ import annotations

import torch

from atom_core.batch import Batch, Pages
from atom_core.cache import KVCacheView
from atom_core.kernels.attention import PagedAttentionSpec
from atom_core.kernels.attention.reference import ReferenceAttention


def batch_of(
    q: torch.Tensor,
    starts: torch.Tensor,
    lengths: torch.Tensor,
    table: torch.Tensor,
    max_query_len: int,
    max_seq_len: int,
) -> Batch:
    """The step of a call: ``q`` begins with the requests' tokens, from ``starts [R + 1]`` on."""
    return Batch(
        query_start_loc=starts,
        seq_lens=lengths,
        pages=Pages(table, torch.empty(0, dtype=torch.int64)),
        num_requests=len(starts) - 1,
        num_tokens=len(q),
        max_query_len=max_query_len,
        max_seq_len=max_seq_len,
    )


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    batch: Batch,
    sinks: torch.Tensor | None,
    out: torch.Tensor,
    *,
    scale: float,
    window: tuple[int, int],
    soft_cap: float,
) -> None:
    """Write attention to ``out``.

    Args:
        q: ``[T, H, D]``.
        k: ``[pages, page size, kv heads, D]``.
        v: as ``k``.
        batch: the step.
        sinks: ``[H]``, in the dtype of ``q``.
        out: as ``q``.
        scale: of scores.
        window: how many keys before and after its own position a query sees; -1 is all.
        soft_cap: 0.0 is none.
    """
    before, after = window
    assert after == (-1 if before == -1 else 0)
    assert sinks is None or sinks.dtype == q.dtype
    spec = PagedAttentionSpec(
        num_heads=q.shape[1],
        num_kv_heads=k.shape[2],
        head_dim=q.shape[2],
        scale=scale,
        dtype=q.dtype,
        cache_dtype=k.dtype,
        window=None if before == -1 else before + 1,
        soft_cap=soft_cap or None,
        sinks=sinks is not None,
    )
    ReferenceAttention(spec)(q, KVCacheView(k.transpose(1, 2), v.transpose(1, 2)), batch, sinks, out)
