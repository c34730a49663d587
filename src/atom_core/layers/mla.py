"""The projections around a layer's attention over latents (MLA, DeepSeek-V2, arXiv 2405.04434).

``H`` heads, of which this rank has some; the latent, and what queries are compressed to, are whole on every rank. What
reads the same input is one product: the compressed queries and the latent, or this rank's queries and the latent.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import nn

from atom_core.attention.mla import MlaLayerSpec
from atom_core.config import MlaConfig, ModelConfig
from atom_core.kernels.fp8_linear.reference import E4M3, LIMIT
from atom_core.kernels.mla_attention import MlaAttentionSpec
from atom_core.kernels.mla_cache import MlaSpec, MlaWeights
from atom_core.kernels.mxfp4_linear.reference import dequantize, requantize
from atom_core.layers.block_fp8 import check_blocks, num_blocks, place_scales
from atom_core.layers.cache_scales import CacheScales
from atom_core.layers.linear import Column, MergedColumnLinear, RowLinear
from atom_core.layers.linear_methods import Fp8Placement, ScalePlacement, Shard, empty_fp8, empty_scales
from atom_core.layers.mxfp4_linear import check_groups, empty_packed, place_packed
from atom_core.layers.norm import HeadNorm, RMSNorm
from atom_core.layers.parameters import ParameterLayer, Placement, empty_parameter, share
from atom_core.layers.rotary import RotaryTable
from atom_core.quant.fp8 import BLOCK_SIZE, Fp8Config
from atom_core.quant.mxfp4 import Mxfp4LinearConfig
from atom_core.runtime import Runtime

#: Of the norms of latents, which no configuration names.
LATENT_EPS = 1e-6


class Expansion(ParameterLayer):
    """The projection from a latent to keys and values, ``[H * (N + V), L]``, which attention reads in two halves.

    It is kept in the model's dtype, for it is folded into queries: an FP8 or MXFP4 checkpoint's is scaled back after
    loading, and FP8 made while loading leaves it alone. What would quantise its input is left out for the same reason.
    """

    #: As the checkpoint has it, until it is scaled back.
    stored: nn.Parameter
    weight_scale: nn.Parameter

    def __init__(self, latent: MlaConfig, num_heads: int, mine: range, runtime: Runtime, name: str) -> None:
        """``num_heads`` are the checkpoint's; of ``mine``, this rank's, those behind them are zeros."""
        super().__init__()
        each = latent.nope_dim + latent.value_dim
        rows = range(mine.start * each, mine.stop * each)
        self.part = Shard("", num_heads * each, latent.rank, rows, range(latent.rank))
        scheme = runtime.quant.linear([name])
        self.scheme = None if isinstance(scheme, Fp8Config) and not scheme.serialized else scheme
        self.weight = empty_parameter(runtime, len(rows), latent.rank)
        if isinstance(self.scheme, Mxfp4LinearConfig):
            check_groups(self.part, name, runtime.tensor_parallel.world_size)
            self.stored, self.weight_scale = empty_packed(runtime, len(rows), latent.rank)
        elif self.scheme is not None:
            self._create_fp8(self.scheme, runtime, name)
        if self.scheme is not None:
            self.stored_shape = self.stored.shape

    def _create_fp8(self, scheme: Fp8Config, runtime: Runtime, name: str) -> None:
        rows, columns = self.weight.shape
        if scheme.block:
            check_blocks(self.part, name, runtime.tensor_parallel.world_size)
        shape = (num_blocks(rows), num_blocks(columns)) if scheme.block else (rows,)
        self.stored, self.weight_scale = empty_fp8(runtime, rows, columns), empty_scales(runtime, *shape)
        if scheme.input_scale == "static":
            self.input_scale = empty_scales(runtime, 1)

    def placements(self) -> Iterator[tuple[str, str, Placement]]:
        """The weight, and what a quantised checkpoint has of it."""
        scheme = self.scheme
        if scheme is None:
            yield "", "weight", self.part.of_matrix(self.weight)
            return
        if isinstance(scheme, Mxfp4LinearConfig):
            stored, scales = place_packed(self.part, self.stored, self.weight_scale)
        else:
            stored = self.part.of_matrix(self.stored, Fp8Placement)
            scales = (
                place_scales(self.part, self.weight_scale)
                if scheme.block
                else self.part.of_rows(self.weight_scale, ScalePlacement)
            )
        yield "", "weight", replace(stored, held_by="stored")
        name = "weight_scale" if isinstance(scheme, Mxfp4LinearConfig) else scheme.scale
        yield "", name, replace(scales, held_by="weight_scale")
        if isinstance(scheme, Fp8Config) and scheme.input_scale == "static":
            yield "", "input_scale", ScalePlacement(self.input_scale, (1,), count=1)

    def finalize_weights(self) -> None:
        """Scale the weight back, and free what was loaded."""
        if self.scheme is None or not self.stored.numel():
            return
        self.weight.data.copy_(self._scaled_back(self.scheme))
        self.stored.data = self.stored.new_empty(0)

    def restore_weights(self, whole: bool) -> None:
        """Make again what the weight was scaled back from: the nearest numbers of the format, which are those."""
        if self.scheme is None:
            return
        self.stored.data = self.stored.new_empty(self.stored_shape)
        if whole:
            return
        if isinstance(self.scheme, Mxfp4LinearConfig):
            self.stored.data.copy_(requantize(self.weight, self.weight_scale))
        else:
            scale = self._scale_of_each(self.scheme)
            numbers = torch.where(scale > 0, self.weight.float() / scale, 0.0)
            self.stored.data.copy_(numbers.clamp(-LIMIT, LIMIT).to(E4M3))

    def _scaled_back(self, scheme: Fp8Config | Mxfp4LinearConfig) -> torch.Tensor:
        if isinstance(scheme, Mxfp4LinearConfig):
            return dequantize(self.stored, self.weight_scale, self.weight.dtype)
        return self.stored.float() * self._scale_of_each(scheme)

    def _scale_of_each(self, scheme: Fp8Config) -> torch.Tensor:
        """The scales in FP8, to be multiplied by the whole weight."""
        scale = self.weight_scale.unsqueeze(-1) if self.weight_scale.dim() == 1 else self.weight_scale
        if scheme.block:
            rows, columns = self.weight.shape
            scale = scale.repeat_interleave(BLOCK_SIZE, 0)[:rows].repeat_interleave(BLOCK_SIZE, 1)[:, :columns]
        return scale


class MlaAttention(nn.Module):
    """See the module's text; the attention op norms, rotates, caches and attends."""

    def __init__(self, config: ModelConfig, index: int, rotary: RotaryTable, runtime: Runtime, name: str) -> None:
        super().__init__()
        latent, hidden = config.latent, config.hidden_size
        assert latent is not None
        group, heads = runtime.tensor_parallel, config.num_heads
        mine = share(heads, group.rank, group.world_size, "num_attention_heads")
        stored_heads = heads - config.padding.heads
        queries = stored_heads * latent.query_dim
        mine_of_queries = range(mine.start * latent.query_dim, mine.stop * latent.query_dim)
        kv = Column("kv_a_proj_with_mqa", latent.row, range(latent.row))
        if latent.query_rank is None:
            first = Column("q_proj", queries, mine_of_queries)
        else:
            rank = latent.query_rank
            first = Column("q_a_proj", rank, range(rank))
            self.q_a_layernorm = RMSNorm(rank, LATENT_EPS, runtime)
            part = [Column("q_b_proj", queries, mine_of_queries)]
            self.q_b_proj = MergedColumnLinear(rank, part, False, runtime, f"{name}.q_b_proj")
        self.compressed = latent.query_rank is not None
        fused = f"{name}.fused_qkv_a_proj_with_mqa"
        self.fused_qkv_a_proj_with_mqa = MergedColumnLinear(hidden, [first, kv], False, runtime, fused)
        self.widths = [len(first.local), len(kv.local)]
        self.kv_a_layernorm = HeadNorm(latent.rank, LATENT_EPS, runtime)
        self.kv_b_proj = Expansion(latent, stored_heads, mine, runtime, f"{name}.kv_b_proj")
        self.o_proj = RowLinear(
            heads * latent.value_dim,
            hidden,
            False,
            runtime,
            "num_attention_heads * v_head_dim",
            f"{name}.o_proj",
            config.padding.heads * latent.value_dim,
        )
        shape = MlaSpec(
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
        weights = MlaWeights(rotary.cos_sin, self.kv_a_layernorm.weight, LATENT_EPS, expand)
        spec = MlaLayerSpec(f"{name}.attn", index, MlaAttentionSpec(shape, latent.scale))
        self.attn = runtime.mla_attention(spec, weights, runtime)
        self.cache_scales = CacheScales(self.attn, runtime.cache_dtype)

    def forward(self, x: torch.Tensor, positions: torch.Tensor, step: object) -> torch.Tensor:
        """``x [T, hidden]`` to ``[T, hidden]``."""
        q, latent = torch.split(self.fused_qkv_a_proj_with_mqa(x), self.widths, -1)
        if self.compressed:
            q = self.q_b_proj(self.q_a_layernorm(q)[0])
        result: torch.Tensor = self.o_proj(self.attn(q, latent, positions, step))
        return result
