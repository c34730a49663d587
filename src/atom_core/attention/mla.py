"""Attention over latents that all heads share (MLA, arXiv 2405.04434), whoever owns the cache.

Two forms give one answer: queries meet the latents themselves (absorbed), or keys and values are made of them for each
head (expanded). A step's plan says which requests go which way; see :mod:`atom_core.kernels.mla_prefill.plan`.
Without a plan, as in a captured graph, all go by the absorbed form, whose launches depend on no length.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import Protocol, cast

import torch

from atom_core.attention.base import AttentionLayer
from atom_core.batch import Batch
from atom_core.cache import LatentCacheView
from atom_core.kernels.head_linear import HEAD_LINEAR, HeadLinearSpec
from atom_core.kernels.mla_absorbed_queries import MLA_ABSORBED_QUERIES, MlaAbsorbedQueriesSpec
from atom_core.kernels.mla_absorbed_values import MLA_ABSORBED_VALUES, MlaAbsorbedValuesSpec
from atom_core.kernels.mla_attention import MLA_ATTENTION, MlaAttentionKernel, MlaAttentionSpec
from atom_core.kernels.mla_cache import MLA_CACHE, MlaSpec, MlaWeights
from atom_core.kernels.mla_fused_decode import MLA_FUSED_DECODE, MlaFusedDecodeSpec
from atom_core.kernels.mla_prefill import MLA_PREFILL
from atom_core.kernels.mla_prefill.plan import PrefillPlan, keys_per_chunk, plan_prefill
from atom_core.runtime import Runtime
from atom_core.types import GraphSupport


@dataclass(frozen=True)
class MlaLayerSpec:
    """One attention layer over latents, as this rank holds it."""

    name: str
    """The layer's full name, unique in the process: "model.layers.0.self_attn.attn"."""
    layer_index: int
    attention: MlaAttentionSpec

    @property
    def latent(self) -> MlaSpec:
        """Its shapes."""
        return self.attention.latent


class BaseMlaAttention(AttentionLayer, ABC):
    """An attention layer over cached latents."""

    def __init__(self, spec: MlaLayerSpec) -> None:
        super().__init__(spec.name, spec.layer_index)
        self.spec = spec

    @abstractmethod
    def forward(self, q: torch.Tensor, latent: torch.Tensor, positions: torch.Tensor, step: object) -> torch.Tensor:
        """Attention of new tokens.

        Args:
            q: ``[T, H * (N + R)]``, straight from the projection; it is written to.
            latent: ``[T, L + R]``, likewise, neither normed nor rotated.
            positions: ``[T]`` integers.
            step: whatever the framework passes through the model for this step; see the child class.

        Returns:
            ``[T, H * V]``.
        """


class CachedMlaAttention(BaseMlaAttention):
    """An attention layer over latents that runs on our kernels, over a cache that the framework owns."""

    def __init__(self, spec: MlaLayerSpec, weights: MlaWeights, runtime: Runtime) -> None:
        super().__init__(spec)
        # Parameters of the model, referred to and not registered again under this module.
        self.weights = weights
        shape, kernels = spec.latent, runtime.kernels
        self.fill_cache = kernels.select(MLA_CACHE, shape)
        self.kernel: MlaAttentionKernel = kernels.select(MLA_ATTENTION, spec.attention)
        self.prefill = kernels.select(MLA_PREFILL, spec.attention)
        into = HeadLinearSpec(shape.num_heads, shape.nope_dim, shape.rank, shape.dtype)
        out_of = HeadLinearSpec(shape.num_heads, shape.rank, shape.value_dim, shape.dtype)
        self.into_latents = kernels.select(HEAD_LINEAR, into)
        separate = (
            (MLA_CACHE.name, kernels.chosen(MLA_CACHE, shape)),
            (HEAD_LINEAR.name, kernels.chosen(HEAD_LINEAR, into)),
        )
        queries = MlaAbsorbedQueriesSpec(shape, separate)
        self.enter = kernels.select(MLA_ABSORBED_QUERIES, queries)
        self.out_of_latents = kernels.select(HEAD_LINEAR, out_of)
        separate = (
            (MLA_ATTENTION.name, kernels.chosen(MLA_ATTENTION, spec.attention)),
            (HEAD_LINEAR.name, kernels.chosen(HEAD_LINEAR, out_of)),
        )
        values = MlaAbsorbedValuesSpec(spec.attention, separate)
        self.values = kernels.select(MLA_ABSORBED_VALUES, values)
        separate = (
            (MLA_ABSORBED_QUERIES.name, kernels.chosen(MLA_ABSORBED_QUERIES, queries)),
            (MLA_ABSORBED_VALUES.name, kernels.chosen(MLA_ABSORBED_VALUES, values)),
        )
        self.alone = kernels.select(MLA_FUSED_DECODE, MlaFusedDecodeSpec(spec.attention, separate))

    @property
    def graph_support(self) -> GraphSupport:
        """Of steps without a plan."""
        return self.kernel.graph_support

    def empty(self, q: torch.Tensor) -> torch.Tensor:
        """Room for the answer to ``q``: ``[T, H, V]``."""
        return q.new_empty(q.shape[0], self.spec.latent.num_heads, self.spec.latent.value_dim)

    def plan_key(self) -> Hashable:
        """As :meth:`atom_core.kernels.attention.PagedAttentionKernel.plan_key`: one for layers of one shape."""
        return self.spec.latent

    def plan(self, batch: Batch) -> PrefillPlan | None:
        """Which requests of the step have their latents expanded."""
        return plan_prefill(batch, self.spec.latent)

    def run(
        self,
        q: torch.Tensor,
        latent: torch.Tensor,
        positions: torch.Tensor,
        batch: Batch,
        cache: LatentCacheView,
        out: torch.Tensor,
    ) -> None:
        """Fill the cache with the new tokens and attend.

        Args:
            q: ``[T, H * (N + R)]``; rows past ``batch.num_tokens`` are padding.
            latent: ``[T, L + R]``.
            positions: ``[T]``.
            batch: the step.
            cache: this layer's pages; the scale is the layer's own.
            out: ``[T, H, V]``, written in its first ``batch.num_tokens`` rows.
        """
        if self.k_scale != cache.scale:
            cache = replace(cache, scale=self.k_scale)
        num_tokens = batch.num_tokens
        queries = torch.unflatten(q[:num_tokens], -1, (self.spec.latent.num_heads, -1))
        out = out[:num_tokens]
        tokens = latent[:num_tokens], positions[:num_tokens]
        slots = batch.slot_mapping[:num_tokens]
        plan = cast("PrefillPlan | None", batch.plans.get(self.plan_key()))
        if plan is None and self.alone is not None and self.alone.takes(num_tokens, cache, batch):
            self.alone(queries, *tokens, self.weights, cache, slots, batch, out)
            return
        if plan is None and self.enter is not None and num_tokens <= self.enter.max_tokens:
            folded = self._room(queries, self.spec.latent.row)
            self.enter(queries, *tokens, self.weights, cache, slots, folded)
            self._attend(folded, cache, batch, out)
            return
        self.fill_cache(queries, *tokens, self.weights, cache, slots)
        if plan is None:
            self._absorbed(queries, cache, batch, out)
            return
        for run in plan.absorbed:
            self._absorbed(queries[run.begin : run.end], cache, run.batch, out[run.begin : run.end])
        self.prefill(queries, self.weights.expand, cache, batch, plan, out)

    def _absorbed(self, q: torch.Tensor, cache: LatentCacheView, batch: Batch, out: torch.Tensor) -> None:
        """``q [T, H, N + R]``, rotated, to ``out [T, H, V]``."""
        shape = self.spec.latent
        folded = self._room(q, shape.row)
        self.into_latents(q, self.weights.expand[:, : shape.nope_dim], folded)
        self._attend(folded, cache, batch, out)

    def _attend(self, folded: torch.Tensor, cache: LatentCacheView, batch: Batch, out: torch.Tensor) -> None:
        """``folded [T, H, L + R]``, queries that meet latents, to ``out [T, H, V]``."""
        shape = self.spec.latent
        expand = self.weights.expand[:, shape.nope_dim :].transpose(1, 2)
        if self.values is not None and self.values.takes(len(folded), cache, batch):
            self.values(folded, cache, batch, expand, out)
            return
        summed = self._room(folded, shape.rank)
        self.kernel(folded, cache, batch, summed)
        self.out_of_latents(summed, expand, out)

    def _room(self, q: torch.Tensor, width: int) -> torch.Tensor:
        """``[T, H, width]``, with as much room beside it as the kernel wants."""
        return q.new_empty(q.shape[0], self.kernel.padded_heads, width)[:, : self.spec.latent.num_heads]


class PagedMlaAttention(CachedMlaAttention):
    """Where cache and batch are found by the layer's name; see :class:`atom_core.attention.base.PagedAttention`."""

    @abstractmethod
    def batch(self) -> Batch | None:
        """This step's batch; None in a run without a batch (memory profiling, warm-up)."""

    @abstractmethod
    def cache(self) -> LatentCacheView:
        """This layer's pages."""

    def attend(self, q: torch.Tensor, latent: torch.Tensor, positions: torch.Tensor, out: torch.Tensor) -> None:
        """Write the attention to ``out [T, H, V]``: zeros in a run without a batch, which touches no cache."""
        batch = self.batch()
        if batch is None:
            self._take_room(out)
            out.zero_()
            return
        self.run(q, latent, positions, batch, self.cache(), out)

    def _take_room(self, out: torch.Tensor) -> None:
        """Have for a moment what prompts need beside ``out``: by such runs engines measure how much memory is left."""
        shape = self.spec.latent
        keys, numbers = keys_per_chunk(shape), shape.nope_dim + shape.value_dim + self.prefill.laid_out
        heads = shape.num_heads * numbers
        _ = out.new_empty(keys, heads), out.new_empty(keys, shape.row), torch.empty_like(out, dtype=torch.float32)

    def forward(
        self, q: torch.Tensor, latent: torch.Tensor, positions: torch.Tensor, step: object = None
    ) -> torch.Tensor:
        """See :meth:`BaseMlaAttention.forward`; ``step`` is not looked at."""
        out = self.empty(q)
        self.attend(q, latent, positions, out)
        return out.flatten(1)


class LatentStep(Protocol):
    """A step that brings its batch and the pools along."""

    def latents(self, layer: CachedMlaAttention) -> tuple[Batch, LatentCacheView]:
        """The batch, planned, and the pages for one layer."""


class RadixMlaAttention(CachedMlaAttention):
    """Where both come in with the step; see :class:`atom_core.attention.base.RadixAttention`."""

    def forward(  # type: ignore[override]
        self,
        q: torch.Tensor,
        latent: torch.Tensor,
        positions: torch.Tensor,
        step: LatentStep,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See :meth:`BaseMlaAttention.forward`; in ``out [T, H * V]`` where there is such."""
        batch, cache = step.latents(self)
        shape = self.spec.latent
        out = self.empty(q).flatten(1) if out is None else out
        self.run(q, latent, positions, batch, cache, out.view(-1, shape.num_heads, shape.value_dim))
        return out
