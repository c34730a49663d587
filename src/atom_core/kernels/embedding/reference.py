"""Embedding in plain torch: the definition."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def embedding(ids: torch.Tensor, weight: torch.Tensor, first: int | None) -> torch.Tensor:
    """See :mod:`atom_core.kernels.embedding`."""
    if first is None:
        return F.embedding(ids, weight)
    local = ids - first
    inside = (local >= 0) & (local < weight.shape[0])
    return F.embedding(local * inside, weight) * inside[:, None]
