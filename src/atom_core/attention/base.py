"""What every attention layer does, whoever owns the cache.

A model calls ``attention(qkv, positions, step)`` and knows nothing of caches. :class:`BaseAttention` chooses the
kernels once and, given a step's batch and a view of the layer's cache, runs them; its children differ only in where
these two come from.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import nn

from atom_core.batch import Batch
from atom_core.cache import KVCacheView
from atom_core.kernels.attention import ATTENTION, PagedAttentionKernel, PagedAttentionSpec
from atom_core.kernels.decode_attention import DECODE_ATTENTION, DecodeAttentionSpec
from atom_core.kernels.qk_norm_rope import QkvSpec, QkvWeights
from atom_core.kernels.qk_norm_rope_cache import QK_NORM_ROPE_CACHE, QkvCacheSpec
from atom_core.runtime import Runtime


@dataclass(frozen=True)
class AttentionSpec:
    """One attention layer, as this rank holds it."""

    name: str
    """The layer's full name, unique in the process: "model.layers.0.self_attn.attn"."""
    layer_index: int
    qkv: QkvSpec
    scale: float
    window: int | None = None
    soft_cap: float | None = None

    def paged(self, cache_dtype: torch.dtype, sinks: bool) -> PagedAttentionSpec:
        """What an attention kernel needs to know of it."""
        return PagedAttentionSpec(
            num_heads=self.qkv.num_heads,
            num_kv_heads=self.qkv.num_kv_heads,
            head_dim=self.qkv.head_dim,
            scale=self.scale,
            dtype=self.qkv.dtype,
            cache_dtype=cache_dtype,
            window=self.window,
            soft_cap=self.soft_cap,
            sinks=sinks,
        )


class AttentionLayer(nn.Module):
    """What all attention layers have in common: a place in the model, and the scales of an FP8 cache."""

    def __init__(self, name: str, layer_index: int) -> None:
        super().__init__()
        self.name, self.layer_index = name, layer_index
        self.k_scale = self.v_scale = 1.0

    def set_scales(self, key: float, value: float) -> None:
        """Scale an FP8 cache, once after loading: graphs are captured with the numbers.

        Where a framework's layer keeps the cache, a child hands them on.
        """
        self.k_scale, self.v_scale = key, value


class BaseAttention(AttentionLayer, ABC):
    """An attention layer over cached keys and values."""

    def __init__(self, spec: AttentionSpec) -> None:
        super().__init__(spec.name, spec.layer_index)
        self.spec = spec

    @abstractmethod
    def forward(self, qkv: torch.Tensor, positions: torch.Tensor, step: object) -> torch.Tensor:
        """Attention of new tokens.

        Args:
            qkv: ``[T, (H + 2K) * D]``, straight from the projection.
            positions: ``[T]`` integers.
            step: whatever the framework passes through the model for this step; see the child class.

        Returns:
            ``[T, H * D]``.
        """


class CachedAttention(BaseAttention):
    """An attention layer that runs on our kernels, over a cache that the framework owns."""

    def __init__(self, spec: AttentionSpec, weights: QkvWeights, sinks: torch.Tensor | None, runtime: Runtime) -> None:
        super().__init__(spec)
        # Parameters of the model, referred to and not registered again under this module.
        self.weights = weights
        self._sinks = (sinks,)
        self.cache_dtype = runtime.cache_dtype
        kernels = runtime.kernels
        paged = spec.paged(runtime.cache_dtype, sinks is not None)
        self.kernel: PagedAttentionKernel = kernels.select(ATTENTION, paged)
        filled = QkvCacheSpec(spec.qkv, runtime.cache_dtype, self.kernel.order)
        self.fill_cache = kernels.select(QK_NORM_ROPE_CACHE, filled)
        separate = (
            (QK_NORM_ROPE_CACHE.name, kernels.chosen(QK_NORM_ROPE_CACHE, filled)),
            (ATTENTION.name, kernels.chosen(ATTENTION, paged)),
        )
        fused = DecodeAttentionSpec(spec.qkv, paged, separate, runtime.same_step_reads)
        self.decode = kernels.select(DECODE_ATTENTION, fused)

    def run(
        self,
        qkv: torch.Tensor,
        positions: torch.Tensor,
        batch: Batch,
        cache: KVCacheView,
        out: torch.Tensor,
    ) -> None:
        """Fill the cache with the new tokens and attend.

        Args:
            qkv: ``[T, (H + 2K) * D]``; rows past ``batch.num_tokens`` are padding.
            positions: ``[T]``.
            batch: the step.
            cache: this layer's pages, in the order that ``self.kernel.order`` names; the scales are the layer's own.
            out: ``[T, H, D]``, written in its first ``batch.num_tokens`` rows.
        """
        if (self.k_scale, self.v_scale) != (cache.k_scale, cache.v_scale):
            cache = replace(cache, k_scale=self.k_scale, v_scale=self.v_scale)
        assert (cache.order, cache.key.dtype) == (self.kernel.order, self.cache_dtype), "pages of another layout"
        slots = batch.slot_mapping
        if (num_tokens := batch.num_tokens) < qkv.shape[0]:
            qkv, positions, out = qkv[:num_tokens], positions[:num_tokens], out[:num_tokens]
        if self.decode is not None and self.decode.takes(batch):
            self.decode(qkv, positions, self.weights, cache, batch, self._sinks[0], out)
            return
        q = self.fill_cache(qkv, positions, self.weights, cache, slots[:num_tokens])
        self.kernel(q, cache, batch, self._sinks[0], out)


class PagedAttention(CachedAttention):
    """Attention whose cache and batch are found by the layer's name, as in vLLM.

    The framework binds the cache to the layer once and announces each step's batch beside the model call, so
    ``step`` carries nothing. An adapter's child says how batch is found, and wraps :meth:`attend` in whatever its
    compiler must not look into.
    """

    @abstractmethod
    def batch(self) -> Batch | None:
        """This step's batch; None in a run without a batch (memory profiling, warm-up)."""

    @abstractmethod
    def cache(self) -> KVCacheView:
        """This layer's pages."""

    def attend(self, qkv: torch.Tensor, positions: torch.Tensor, out: torch.Tensor) -> None:
        """Write the attention to ``out [T, H, D]``: zeros in a run without a batch, which touches no cache."""
        batch = self.batch()
        if batch is None:
            out.zero_()
            return
        self.run(qkv, positions, batch, self.cache(), out)

    def forward(self, qkv: torch.Tensor, positions: torch.Tensor, step: object = None) -> torch.Tensor:
        """See :meth:`BaseAttention.forward`; ``step`` is not looked at."""
        out = qkv.new_empty(qkv.shape[0], self.spec.qkv.num_heads, self.spec.qkv.head_dim)
        self.attend(qkv, positions, out)
        return out.flatten(1)


class CachedStep(Protocol):
    """A step that brings its batch and the pools along."""

    def attention(self, layer_index: int) -> tuple[Batch, KVCacheView]:
        """The batch and the pages for one layer (layers with a window may have both of their own)."""


class RadixAttention(CachedAttention):
    """Attention whose cache and batch come in with the step, as in SGLang and in the standalone runner."""

    def forward(  # type: ignore[override]
        self, qkv: torch.Tensor, positions: torch.Tensor, step: CachedStep, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """See :meth:`BaseAttention.forward`; in ``out [T, H * D]`` where there is such."""
        batch, cache = step.attention(self.spec.layer_index)
        heads, dim = self.spec.qkv.num_heads, self.spec.qkv.head_dim
        out = qkv.new_empty(qkv.shape[0], heads * dim) if out is None else out
        self.run(qkv, positions, batch, cache, out.view(-1, heads, dim))
        return out
