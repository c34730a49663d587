"""Attention whose cache and metadata are found by the layer's name, as in vLLM.

The framework binds the cache to the layer once and announces each step's metadata beside the model call, so ``step``
carries nothing. An adapter's child says how metadata is found, and wraps :meth:`PagedAttention.attend` in whatever
its compiler must not look into.
"""

from __future__ import annotations

from abc import abstractmethod

import torch

from atom_core.attention.base import CachedAttention
from atom_core.metadata import AttentionMetadata, KVCacheView


class PagedAttention(CachedAttention):
    """See the module's text."""

    @abstractmethod
    def metadata(self) -> AttentionMetadata | None:
        """This step's metadata; None in a run without a batch (memory profiling, warm-up)."""

    @abstractmethod
    def cache(self) -> KVCacheView:
        """This layer's pages."""

    def attend(self, qkv: torch.Tensor, positions: torch.Tensor, out: torch.Tensor) -> None:
        """Write the attention to ``out [T, H, D]``: zeros in a run without a batch, which touches no cache."""
        metadata = self.metadata()
        if metadata is None:
            out.zero_()
            return
        self.run(qkv, positions, metadata, self.cache(), out)

    def forward(self, qkv: torch.Tensor, positions: torch.Tensor, step: object = None) -> torch.Tensor:
        """See :meth:`BaseAttention.forward`; ``step`` is not looked at."""
        out = qkv.new_empty(qkv.shape[0], self.spec.qkv.num_heads, self.spec.qkv.head_dim)
        self.attend(qkv, positions, out)
        return out.flatten(1)
