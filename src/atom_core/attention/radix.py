"""Attention whose cache and metadata come in with the step, as in SGLang and in the standalone runner."""

from __future__ import annotations

from typing import Protocol

import torch

from atom_core.attention.base import CachedAttention
from atom_core.metadata import AttentionMetadata, KVCacheView


class CachedStep(Protocol):
    """A step that brings its batch and the pools along."""

    def attention(self, layer_index: int) -> tuple[AttentionMetadata, KVCacheView]:
        """The metadata and the pages for one layer (layers with a window may have both of their own)."""


class RadixAttention(CachedAttention):
    """See the module's text."""

    def forward(  # type: ignore[override]
        self, qkv: torch.Tensor, positions: torch.Tensor, step: CachedStep, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """See :meth:`BaseAttention.forward`; in ``out [T, H * D]`` where there is such."""
        metadata, cache = step.attention(self.spec.layer_index)
        heads, dim = self.spec.qkv.num_heads, self.spec.qkv.head_dim
        out = qkv.new_empty(qkv.shape[0], heads * dim) if out is None else out
        self.run(qkv, positions, metadata, cache, out.view(-1, heads, dim))
        return out
