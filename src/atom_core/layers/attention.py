"""The projections around a layer's attention: grouped queries, with or without biases and norms of q and k."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from atom_core.attention.base import AttentionSpec
from atom_core.config import LayerConfig, ModelConfig
from atom_core.kernels.qk_norm_rope import QkvSpec, QkvWeights
from atom_core.layers.cache_scales import CacheScales
from atom_core.layers.linear import QkvLinear, RowLinear
from atom_core.layers.linear_methods import stored
from atom_core.layers.norm import HeadNorm
from atom_core.layers.parameters import ParameterLayer, Placement, empty_parameter
from atom_core.layers.rotary import RotaryTable
from atom_core.runtime import Runtime


class Attention(ParameterLayer):
    """Projections around the attention op, which norms, rotates, caches and attends."""

    def __init__(
        self,
        config: ModelConfig,
        layer: LayerConfig,
        index: int,
        rotary: RotaryTable,
        runtime: Runtime,
        name: str,
    ) -> None:
        super().__init__()
        heads, dim = config.num_heads, config.head_dim
        self.qkv_proj = QkvLinear(
            config.hidden_size,
            heads,
            config.num_kv_heads,
            dim,
            config.qkv_bias,
            runtime,
            f"{name}.qkv_proj",
            config.padding,
        )
        self.o_proj = RowLinear(
            heads * dim,
            config.hidden_size,
            config.attention_out_bias,
            runtime,
            "num_attention_heads * head_dim",
            f"{name}.o_proj",
            config.padding.heads * dim,
        )
        weights = QkvWeights(rotary.cos_sin)
        if config.qk_norm:
            self.q_norm = HeadNorm(dim, config.rms_norm_eps, runtime)
            self.k_norm = HeadNorm(dim, config.rms_norm_eps, runtime)
            weights = QkvWeights(rotary.cos_sin, self.q_norm.weight, self.k_norm.weight, config.rms_norm_eps)
        spec = AttentionSpec(
            name=f"{name}.attn",
            layer_index=index,
            qkv=QkvSpec(
                num_heads=self.qkv_proj.num_heads,
                num_kv_heads=self.qkv_proj.num_kv_heads,
                head_dim=dim,
                rotary_dim=config.rope.rotary_dim,
                interleaved=config.rope.interleaved,
                qk_norm=config.qk_norm,
                dtype=runtime.dtype,
            ),
            scale=dim**-0.5,
            window=layer.window,
        )
        self.stored_heads, self.group = heads - config.padding.heads, runtime.tensor_parallel
        wide = replace(runtime, dtype=torch.float32)  # as attention adds up
        self.sinks = empty_parameter(wide, self.qkv_proj.num_heads) if config.sinks else None
        self.attn = runtime.attention(spec, weights, self.sinks, runtime)
        self.cache_scales = CacheScales(self.attn, runtime.cache_dtype)

    def forward(self, x: torch.Tensor, positions: torch.Tensor, step: object) -> torch.Tensor:
        """``x [T, hidden]`` to ``[T, hidden]``."""
        result: torch.Tensor = self.o_proj(self.attn(self.qkv_proj(x), positions, step))
        return result

    def placements(self) -> Iterator[tuple[str, str, Placement]]:
        """Sinks, where there are some: a number a head."""
        if self.sinks is not None:
            first = self.group.rank * len(self.sinks)
            source, count, padding = stored(range(first, first + len(self.sinks)), self.stored_heads)
            shape = (self.stored_heads,)
            yield "", "sinks", Placement(self.sinks, shape, source=source, count=count, padding=padding)
