"""Multi-head latent attention (MLA, DeepSeek-V2, arXiv 2405.04434).

A token's cache row is one latent of ``L`` elements and a rotated key of ``R``, the same for all heads and on every
rank. A head's query has ``N`` elements for the latent and ``R`` for the rotated key; its value has ``V``.
:class:`MultiHeadLatentAttention` has the projections: one product gives the latent together with the compressed
query or with this rank's queries. Between them :class:`MlaMixer` norms, rotates, writes the cache
and attends.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import groupby
from typing import cast

import torch
from torch import nn

from atom_core.batch import Batch, BatchShape
from atom_core.cache import LatentCacheView, LatentSpec
from atom_core.config import MlaConfig, ModelConfig
from atom_core.kernels.compile_keys import attention_keys
from atom_core.kernels.head_linear import HEAD_LINEAR, HeadLinearSpec
from atom_core.kernels.mla_absorbed_queries import MLA_ABSORBED_QUERIES, MlaAbsorbedQueriesSpec
from atom_core.kernels.mla_absorbed_values import MLA_ABSORBED_VALUES, MlaAbsorbedValuesSpec
from atom_core.kernels.mla_attention import MLA_ATTENTION, MlaAttentionKernel, MlaAttentionSpec
from atom_core.kernels.mla_cache import MLA_CACHE, MlaSpec, MlaWeights
from atom_core.kernels.mla_fused_decode import MLA_FUSED_DECODE, MlaFusedDecodeSpec
from atom_core.kernels.mla_prefill import MLA_PREFILL
from atom_core.kernels.mla_prefill.plan import PrefillPlan, expanding_is_cheaper, keys_per_chunk, plan_prefill
from atom_core.kernels.select import KernelSet
from atom_core.layers.latent_expansion import LatentExpansion
from atom_core.layers.linear import Column, MergedColumnLinear, RowLinear
from atom_core.layers.norm import HeadNorm, RMSNorm
from atom_core.layers.parameters import share
from atom_core.layers.rotary import RotaryTable
from atom_core.mixers.base import TokenMixer
from atom_core.mixers.cache_scales import CacheScales
from atom_core.runtime import Runtime
from atom_core.types import GraphSupport

#: Epsilon of the latents' norms, which configurations do not name.
LATENT_EPS = 1e-6


class MlaMixer(TokenMixer):
    """MLA by our kernels. Its inputs are ``q [T, H * (N + R)]`` and ``latent [T, L + R]``, neither normed nor rotated.

    Two forms give one result: queries are multiplied into the latents' space (absorbed), or the latents are
    expanded to keys and values. A step's plan says which requests go which way
    (:mod:`atom_core.kernels.mla_prefill.plan`). Without a plan, as in a captured graph, all use the absorbed form,
    whose launches do not depend on lengths.

    Args:
        name, layer_index: see :class:`TokenMixer`.
        attention: shapes and the scores' factor.
        weights: of the latents' norm and of the expansion, and the rope table.
    """

    plans_by_host_lengths = True

    def __init__(self, name: str, layer_index: int, attention: MlaAttentionSpec, weights: MlaWeights) -> None:
        shape = attention.latent
        super().__init__(
            name,
            layer_index,
            (shape.num_heads, shape.value_dim),
            shape.nope_dim + shape.rope_dim,
            attention.scale,
        )
        self.attention, self.shape, self.weights = attention, shape, weights

    @cached_property
    def cache_spec(self) -> LatentSpec:
        """A row of the latent and the rotated key."""
        return LatentSpec(self.shape.row, self.shape.cache_dtype)

    @property
    def graph_support(self) -> GraphSupport:
        """Decodes only: plans of prompts need lengths on the host."""
        return "none" if self.kernel.graph_support == "none" else "decodes"

    def select_kernels(self, kernels: KernelSet) -> None:
        """Select the kernels of both forms, and fused ones for few tokens where supported."""
        shape = self.shape
        self.fill_cache = kernels.select(MLA_CACHE, shape)
        self.kernel: MlaAttentionKernel = kernels.select(MLA_ATTENTION, self.attention)
        self.prefill = kernels.select(MLA_PREFILL, self.attention)
        into = HeadLinearSpec(shape.num_heads, shape.nope_dim, shape.rank, shape.dtype)
        out_of = HeadLinearSpec(shape.num_heads, shape.rank, shape.value_dim, shape.dtype)
        self.into_latents = kernels.select(HEAD_LINEAR, into)
        self.out_of_latents = kernels.select(HEAD_LINEAR, out_of)
        head_linear = (HEAD_LINEAR.name, kernels.chosen(HEAD_LINEAR, into))
        queries = MlaAbsorbedQueriesSpec(shape, ((MLA_CACHE.name, kernels.chosen(MLA_CACHE, shape)), head_linear))
        self.absorbed_queries = kernels.select(MLA_ABSORBED_QUERIES, queries)
        head_linear = (HEAD_LINEAR.name, kernels.chosen(HEAD_LINEAR, out_of))
        attention = (MLA_ATTENTION.name, kernels.chosen(MLA_ATTENTION, self.attention))
        values = MlaAbsorbedValuesSpec(self.attention, (attention, head_linear))
        self.absorbed_values = kernels.select(MLA_ABSORBED_VALUES, values)
        separate = (
            (MLA_ABSORBED_QUERIES.name, kernels.chosen(MLA_ABSORBED_QUERIES, queries)),
            (MLA_ABSORBED_VALUES.name, kernels.chosen(MLA_ABSORBED_VALUES, values)),
        )
        self.fused_decode = kernels.select(MLA_FUSED_DECODE, MlaFusedDecodeSpec(self.attention, separate))

    def attention_compile_keys(self, shape: BatchShape, device: torch.device) -> list[Hashable]:
        """See :meth:`TokenMixer.attention_compile_keys`."""
        expanded = {
            new: new > shape.decode_tokens and expanding_is_cheaper(new, shape.cached + new, self.shape)
            for new in dict.fromkeys(shape.queries)
        }
        if any(expanded.values()):
            found = attention_keys(self.fill_cache, shape, device) + attention_keys(self.prefill, shape, device)
            for is_expanded, run in groupby(shape.queries, key=expanded.__getitem__):
                if not is_expanded:
                    queries = tuple(run)
                    length = shape.cached + max(queries)
                    found += self._absorb_keys(replace(shape, queries=queries, max_seq_len=length), device)
            return found
        if self.fused_decode is not None and self.fused_decode.takes_shape(shape, device):
            return attention_keys(self.fused_decode, shape, device)
        if self.absorbed_queries is not None and shape.num_tokens <= self.absorbed_queries.max_tokens:
            return attention_keys(self.absorbed_queries, shape, device) + self._attend_keys(shape, device)
        return attention_keys(self.fill_cache, shape, device) + self._absorb_keys(shape, device)

    def _absorb_keys(self, shape: BatchShape, device: torch.device) -> list[Hashable]:
        return attention_keys(self.into_latents, shape, device) + self._attend_keys(shape, device)

    def _attend_keys(self, shape: BatchShape, device: torch.device) -> list[Hashable]:
        if self.absorbed_values is not None and self.absorbed_values.takes_shape(shape, device):
            return attention_keys(self.absorbed_values, shape, device)
        return attention_keys(self.kernel, shape, device) + attention_keys(self.out_of_latents, shape, device)

    def plan_key(self) -> Hashable:
        """One for layers of one shape."""
        return self.shape

    def plan(self, batch: Batch) -> PrefillPlan | None:
        """The requests of the step whose latents are expanded."""
        return plan_prefill(batch, self.shape)

    def scaled(self, cache: LatentCacheView) -> LatentCacheView:
        """See :meth:`TokenMixer.scaled`."""
        return replace(cache, scale=self.k_scale)

    def run(
        self,
        inputs: Sequence[torch.Tensor],
        positions: torch.Tensor,
        batch: Batch,
        cache: LatentCacheView,
        out: torch.Tensor,
    ) -> None:
        """See :meth:`TokenMixer.run`."""
        q, latent = inputs
        if self.k_scale != cache.scale:
            cache = self.scaled(cache)
        num_tokens = batch.num_tokens
        queries = torch.unflatten(q[:num_tokens], -1, (self.shape.num_heads, -1))
        out = out[:num_tokens]
        tokens = latent[:num_tokens], positions[:num_tokens]
        slots = batch.pages.slots[:num_tokens]
        plan = cast("PrefillPlan | None", batch.plans.get(self.plan_key()))
        if plan is None and self.fused_decode is not None and self.fused_decode.takes(num_tokens, cache, batch):
            self.fused_decode(queries, *tokens, self.weights, cache, slots, batch, out)
            return
        if plan is None and self.absorbed_queries is not None and num_tokens <= self.absorbed_queries.max_tokens:
            absorbed = self._empty_heads(queries, self.shape.row)
            self.absorbed_queries(queries, *tokens, self.weights, cache, slots, absorbed)
            self._attend(absorbed, cache, batch, out)
            return
        self.fill_cache(queries, *tokens, self.weights, cache, slots)
        if plan is None:
            self._absorb(queries, cache, batch, out)
            return
        for run in plan.absorbed:
            self._absorb(queries[run.begin : run.end], cache, run.batch, out[run.begin : run.end])
        self.prefill(queries, self.weights.expand, cache, batch, plan, out)

    def _absorb(self, q: torch.Tensor, cache: LatentCacheView, batch: Batch, out: torch.Tensor) -> None:
        """``q [T, H, N + R]``, rotated, to ``out [T, H, V]``."""
        absorbed = self._empty_heads(q, self.shape.row)
        self.into_latents(q, self.weights.expand[:, : self.shape.nope_dim], absorbed)
        self._attend(absorbed, cache, batch, out)

    def _attend(self, absorbed: torch.Tensor, cache: LatentCacheView, batch: Batch, out: torch.Tensor) -> None:
        """``absorbed [T, H, L + R]``, queries in the latents' space, to ``out [T, H, V]``."""
        expand = self.weights.expand[:, self.shape.nope_dim :].transpose(1, 2)
        if self.absorbed_values is not None and self.absorbed_values.takes(len(absorbed), cache, batch):
            self.absorbed_values(absorbed, cache, batch, expand, out)
            return
        summed = self._empty_heads(absorbed, self.shape.rank)
        self.kernel(absorbed, cache, batch, summed)
        self.out_of_latents(summed, expand, out)

    def _empty_heads(self, q: torch.Tensor, width: int) -> torch.Tensor:
        """Uninitialised ``[T, H, width]`` with the kernel's padded heads allocated."""
        return q.new_empty(q.shape[0], self.kernel.padded_heads, width)[:, : self.shape.num_heads]

    def profile(self, out: torch.Tensor, max_requests: int) -> None:
        """See :meth:`TokenMixer.profile`: what prompts need."""
        shape = self.shape
        keys, each = keys_per_chunk(shape), shape.nope_dim + shape.value_dim + self.prefill.laid_out
        _ = out.new_empty(keys, shape.num_heads * each), out.new_empty(keys, shape.row)
        _ = torch.empty_like(out, dtype=torch.float32)


class MultiHeadLatentAttention(nn.Module):
    """The projections around :class:`MlaMixer`."""

    module_name = "self_attn"

    def __init__(self, model: ModelConfig, index: int, rotary: RotaryTable, runtime: Runtime, name: str) -> None:
        super().__init__()
        latent, hidden = model.layers[index].mixer, model.hidden_size
        assert isinstance(latent, MlaConfig)
        group, heads = runtime.tensor_parallel, latent.num_heads
        mine = share(heads, group.rank, group.world_size, "num_attention_heads")
        stored_heads = heads - latent.padding.heads
        queries = stored_heads * latent.query_dim
        mine_of_queries = range(mine.start * latent.query_dim, mine.stop * latent.query_dim)
        kv = Column("kv_a_proj_with_mqa", latent.row, range(latent.row))
        if latent.query_rank is None:
            first = Column("q_proj", queries, mine_of_queries)
        else:
            rank = latent.query_rank
            first = Column("q_a_proj", rank, range(rank))
            self.q_a_layernorm = RMSNorm(rank, LATENT_EPS, runtime)
            columns = [Column("q_b_proj", queries, mine_of_queries)]
            self.q_b_proj = MergedColumnLinear(rank, columns, False, runtime, f"{name}.q_b_proj")
        self.compressed = latent.query_rank is not None
        fused = f"{name}.fused_qkv_a_proj_with_mqa"
        self.fused_qkv_a_proj_with_mqa = MergedColumnLinear(hidden, [first, kv], False, runtime, fused)
        self.widths = [len(first.local), len(kv.local)]
        self.kv_a_layernorm = HeadNorm(latent.rank, LATENT_EPS, runtime)
        self.kv_b_proj = LatentExpansion(latent, stored_heads, mine, runtime, f"{name}.kv_b_proj")
        self.o_proj = RowLinear(
            heads * latent.value_dim,
            hidden,
            False,
            runtime,
            "num_attention_heads * v_head_dim",
            f"{name}.o_proj",
            latent.padding.heads * latent.value_dim,
        )
        shape = MlaSpec(
            num_heads=len(mine),
            rank=latent.rank,
            nope_dim=latent.nope_dim,
            rope_dim=latent.rope_dim,
            value_dim=latent.value_dim,
            interleaved=model.rope.interleaved,
            dtype=runtime.dtype,
            cache_dtype=runtime.cache_dtype,
        )
        expand = self.kv_b_proj.weight.view(len(mine), -1, latent.rank)
        weights = MlaWeights(rotary.cos_sin, self.kv_a_layernorm.gain, LATENT_EPS, expand)
        mixer = MlaMixer(f"{name}.attn", index, MlaAttentionSpec(shape, latent.scale), weights)
        self.attn = runtime.bind(mixer, runtime)
        self.cache_scales = CacheScales(self.attn, runtime.cache_dtype)

    def forward(self, x: torch.Tensor, positions: torch.Tensor, step: object) -> torch.Tensor:
        """``x [T, hidden]`` to ``[T, hidden]``."""
        q, latent = torch.split(self.fused_qkv_a_proj_with_mqa(x), self.widths, -1)
        if self.compressed:
            q = self.q_b_proj(self.q_a_layernorm(q)[0])
        result: torch.Tensor = self.o_proj(self.attn((q, latent), positions, step))
        return result
