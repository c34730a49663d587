"""The norms and projections around a layer's attention over latents (MLA, DeepSeek-V2, arXiv 2405.04434).

``H`` heads, of which this rank has some; the latent, and what queries are compressed to, are whole on every rank. What
reads the same input is one product: the compressed queries and the latent, or this rank's queries and the latent.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import nn

from atom_core.attention.mla import LatentLayerSpec
from atom_core.config import LatentConfig, ModelConfig
from atom_core.kernels.latent_attention import LatentAttentionSpec
from atom_core.kernels.latent_cache import LatentSpec, LatentWeights
from atom_core.layers.block_fp8 import check_blocks, num_blocks, place_scales
from atom_core.layers.cache_scales import CacheScales
from atom_core.layers.linear import Column, MergedColumnLinear, RowLinear
from atom_core.layers.linear_methods import Fp8Placement, Part, ScalePlacement, empty_fp8, empty_scales
from atom_core.layers.norm import HeadNorm, RMSNorm, Stream
from atom_core.layers.normed_linear import NormedLinear
from atom_core.layers.parameters import ParameterLayer, Placement, empty_parameter, share
from atom_core.layers.rotary import RotaryTable
from atom_core.quant.fp8 import BLOCK_SIZE
from atom_core.runtime import Runtime

#: Of the norms of latents, which no configuration names.
LATENT_EPS = 1e-6


class Expansion(ParameterLayer):
    """The projection from a latent to keys and values, ``[H * (N + V), L]``, which attention reads in two halves.

    It is kept in the model's dtype, for it is folded into queries: an FP8 checkpoint's is scaled back after loading,
    and FP8 made while loading leaves it alone.
    """

    def __init__(self, latent: LatentConfig, num_heads: int, mine: range, runtime: Runtime, name: str) -> None:
        super().__init__()
        each = latent.nope_dim + latent.value_dim
        rows = range(mine.start * each, mine.stop * each)
        self.part = Part("", num_heads * each, latent.rank, rows, range(latent.rank))
        scheme = runtime.quant.linear([name])
        self.scheme = scheme if scheme is not None and scheme.serialized else None
        self.weight = empty_parameter(runtime, len(rows), latent.rank)
        if self.scheme is not None:
            blocks = self.scheme.block
            if blocks:
                check_blocks(self.part, name, runtime.tensor_parallel.world_size)
            shape = (num_blocks(len(rows)), num_blocks(latent.rank)) if blocks else (len(rows),)
            self.stored = empty_fp8(runtime, len(rows), latent.rank)
            self.weight_scale = empty_scales(runtime, *shape)
            if self.scheme.input_scale == "static":
                self.input_scale = empty_scales(runtime, 1)  # of activations that are not quantised here

    def placements(self) -> Iterator[tuple[str, str, Placement]]:
        """The weight, and what an FP8 checkpoint has of it."""
        if self.scheme is None:
            yield "", "weight", self.part.of_matrix(self.weight)
            return
        yield "", "weight", replace(self.part.of_matrix(self.stored, Fp8Placement), held_by="stored")
        scales = (
            place_scales(self.part, self.weight_scale)
            if self.scheme.block
            else self.part.of_rows(self.weight_scale, ScalePlacement)
        )
        yield "", self.scheme.scale, replace(scales, held_by="weight_scale")
        if self.scheme.input_scale == "static":
            yield "", "input_scale", ScalePlacement(self.input_scale, (1,), count=1)

    def finalize_weights(self) -> None:
        """Scale the weight back, and free what was loaded; called again, there is nothing to do."""
        if self.scheme is None or not self.stored.numel():
            return
        scale = self.weight_scale.unsqueeze(-1) if self.weight_scale.dim() == 1 else self.weight_scale
        if self.scheme.block:
            rows, columns = self.weight.shape
            scale = scale.repeat_interleave(BLOCK_SIZE, 0)[:rows].repeat_interleave(BLOCK_SIZE, 1)[:, :columns]
        self.weight.data.copy_(self.stored.float() * scale)
        self.stored.data = self.stored.new_empty(0)


class LatentAttention(nn.Module):
    """See the module's text; the attention op norms, rotates, caches and attends."""

    def __init__(
        self, config: ModelConfig, index: int, norm: RMSNorm, rotary: RotaryTable, runtime: Runtime, name: str
    ) -> None:
        super().__init__()
        latent, hidden = config.latent, config.hidden_size
        assert latent is not None
        group, heads = runtime.tensor_parallel, config.num_heads
        mine = share(heads, group.rank, group.world_size, "num_attention_heads")
        queries = heads * latent.query_dim
        mine_of_queries = range(mine.start * latent.query_dim, mine.stop * latent.query_dim)
        kv = Column("kv_a_proj_with_mqa", latent.row, range(latent.row))
        if latent.query_rank is None:
            first = Column("q_proj", queries, mine_of_queries)
        else:
            rank = latent.query_rank
            first = Column("q_a_proj", rank, range(rank))
            self.q_a_layernorm = RMSNorm(rank, LATENT_EPS, runtime)
            part = [Column("q_b_proj", queries, mine_of_queries)]
            self.queries = MergedColumnLinear(rank, part, False, runtime, f"{name}.queries")
            self.decompress = NormedLinear(self.q_a_layernorm, self.queries, None, runtime)
        self.compressed = latent.query_rank is not None
        self.down = MergedColumnLinear(hidden, [first, kv], False, runtime, f"{name}.down")
        self.widths = [len(first.local), len(kv.local)]
        self.enter = NormedLinear(norm, self.down, None, runtime)
        self.kv_a_layernorm = HeadNorm(latent.rank, LATENT_EPS, runtime)
        self.kv_b_proj = Expansion(latent, heads, mine, runtime, f"{name}.kv_b_proj")
        self.o_proj = RowLinear(
            heads * latent.value_dim, hidden, False, runtime, "num_attention_heads * v_head_dim", f"{name}.o_proj"
        )
        shape = LatentSpec(
            num_heads=len(mine),
            rank=latent.rank,
            nope_dim=latent.nope_dim,
            rope_dim=latent.rope_dim,
            value_dim=latent.value_dim,
            interleaved=config.rope.interleaved,
            dtype=runtime.dtype,
            cache_dtype=runtime.cache_dtype,
        )
        expand = self.kv_b_proj.weight.view(len(mine), -1, latent.rank)
        weights = LatentWeights(rotary.cos_sin, self.kv_a_layernorm.weight, LATENT_EPS, expand)
        spec = LatentLayerSpec(f"{name}.attn", index, LatentAttentionSpec(shape, latent.scale))
        self.attn = runtime.latent_attention(spec, weights, runtime)
        self.cache_scales = CacheScales(self.attn, runtime.cache_dtype)

    def forward(self, stream: Stream, positions: torch.Tensor, step: object) -> Stream:
        """Read the stream's norm and add to it."""
        down, residual = self.enter(stream)
        q, latent = torch.split(down, self.widths, -1)
        if self.compressed:
            q, _ = self.decompress(Stream(None, q))
        return self.o_proj.add(self.attn(q, latent, positions, step), residual)
