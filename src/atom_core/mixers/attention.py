"""Attention over cached keys and values (MHA, GQA, MQA), full or in a sliding window.

:class:`Attention` has the projections, with or without biases and norms of q and k. Between them
:class:`AttentionMixer` norms, rotates, writes the cache and attends.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property

import torch

from atom_core.batch import Batch, BatchShape
from atom_core.cache import KeyValueSpec, KVCacheView
from atom_core.config import AttentionConfig, ModelConfig
from atom_core.kernels.attention import ATTENTION, PagedAttentionKernel, PagedAttentionSpec
from atom_core.kernels.compile_keys import attention_keys
from atom_core.kernels.decode_attention import DECODE_ATTENTION, DecodeAttentionSpec
from atom_core.kernels.output_gate import OUTPUT_GATE, OutputGateKernel, OutputGateSpec
from atom_core.kernels.qk_norm_rope import QkvSpec, QkvWeights
from atom_core.kernels.qk_norm_rope_cache import QK_NORM_ROPE_CACHE, QkvCacheSpec
from atom_core.kernels.select import KernelSet
from atom_core.layers.linear import QkvLinear, RowLinear
from atom_core.layers.linear_methods import stored
from atom_core.layers.norm import HeadNorm
from atom_core.layers.parameters import ParameterLayer, Placement, empty_parameter
from atom_core.layers.rotary import RotaryTable
from atom_core.mixers.base import TokenMixer
from atom_core.mixers.cache_scales import CacheScales
from atom_core.runtime import Runtime
from atom_core.types import GraphSupport


class AttentionMixer(TokenMixer):
    """Attention by our kernels.

    Its input is ``qkv [T, (H + 2K) * D]``, straight from the projection. With an output gate a second one is the gates
    ``[T, H * D]``, by whose sigmoids the output is multiplied.

    Args:
        name, layer_index: see :class:`TokenMixer`.
        qkv: shapes of q, k and v, and how q and k are transformed.
        weights: of the norms of q and k, and the rope table.
        sinks: float32 ``[H]``, or None.
        window: see :class:`TokenMixer`.
        runtime: the model's.
        output_gate: whether there is the second input.
    """

    #: Selected by :meth:`select_kernels`.
    kernel: PagedAttentionKernel
    multiply_by_gate: OutputGateKernel

    def __init__(
        self,
        name: str,
        layer_index: int,
        qkv: QkvSpec,
        weights: QkvWeights,
        sinks: torch.Tensor | None,
        window: int | None,
        runtime: Runtime,
        output_gate: bool = False,
    ) -> None:
        super().__init__(name, layer_index, (qkv.num_heads, qkv.head_dim), qkv.head_dim, qkv.head_dim**-0.5)
        self.qkv, self.weights, self.sinks, self.window = qkv, weights, sinks, window
        self.output_gate = output_gate
        self.cache_dtype, self.same_step_reads = runtime.cache_dtype, runtime.same_step_reads

    @cached_property
    def cache_spec(self) -> KeyValueSpec:
        """Pages in the order that the kernel reads."""
        return KeyValueSpec(self.qkv.num_kv_heads, self.qkv.head_dim, self.cache_dtype, self.window, self.kernel.order)

    @property
    def graph_support(self) -> GraphSupport:
        """The kernel's."""
        return self.kernel.graph_support

    def select_kernels(self, kernels: KernelSet) -> None:
        """Select the kernels of prompts and mixed steps, and a fused one for decoding where supported."""
        paged = PagedAttentionSpec(
            num_heads=self.qkv.num_heads,
            num_kv_heads=self.qkv.num_kv_heads,
            head_dim=self.qkv.head_dim,
            scale=self.scale,
            dtype=self.qkv.dtype,
            cache_dtype=self.cache_dtype,
            window=self.window,
            soft_cap=self.soft_cap,
            sinks=self.sinks is not None,
        )
        self.kernel = kernels.select(ATTENTION, paged)
        filled = QkvCacheSpec(self.qkv, self.cache_dtype, self.kernel.order)
        self.fill_cache = kernels.select(QK_NORM_ROPE_CACHE, filled)
        separate = (
            (QK_NORM_ROPE_CACHE.name, kernels.chosen(QK_NORM_ROPE_CACHE, filled)),
            (ATTENTION.name, kernels.chosen(ATTENTION, paged)),
        )
        fused = DecodeAttentionSpec(self.qkv, paged, separate, self.same_step_reads)
        self.decode = kernels.select(DECODE_ATTENTION, fused)
        if self.output_gate:
            self.multiply_by_gate = kernels.select(OUTPUT_GATE, OutputGateSpec(self.heads[0] * self.heads[1]))

    def attention_compile_keys(self, shape: BatchShape, device: torch.device) -> list[Hashable]:
        """See :meth:`TokenMixer.attention_compile_keys`."""
        if self.decode is not None and self.decode.takes(shape):
            return attention_keys(self.decode, shape, device)
        return attention_keys(self.fill_cache, shape, device) + attention_keys(self.kernel, shape, device)

    def plan_key(self) -> Hashable | None:
        """The kernel's."""
        return self.kernel.plan_key()

    def plan(self, batch: Batch) -> object:
        """The kernel's."""
        return self.kernel.plan(batch)

    def scaled(self, cache: KVCacheView) -> KVCacheView:
        """See :meth:`TokenMixer.scaled`."""
        return replace(cache, k_scale=self.k_scale, v_scale=self.v_scale)

    def run(
        self,
        inputs: Sequence[torch.Tensor],
        positions: torch.Tensor,
        batch: Batch,
        cache: KVCacheView,
        out: torch.Tensor,
    ) -> None:
        """See :meth:`TokenMixer.run`."""
        qkv, *gates = inputs
        if (self.k_scale, self.v_scale) != (cache.k_scale, cache.v_scale):
            cache = self.scaled(cache)
        assert (cache.order, cache.key.dtype) == (self.kernel.order, self.cache_dtype), "pages of another layout"
        if (num_tokens := batch.num_tokens) < qkv.shape[0]:
            qkv, positions, out = qkv[:num_tokens], positions[:num_tokens], out[:num_tokens]
        if self.decode is not None and self.decode.takes(batch):
            self.decode(qkv, positions, self.weights, cache, batch, self.sinks, out)
        else:
            q = self.fill_cache(qkv, positions, self.weights, cache, batch.pages.slots[:num_tokens])
            self.kernel(q, cache, batch, self.sinks, out)
        for gate in gates:
            self.multiply_by_gate(out, gate[:num_tokens])


class Attention(ParameterLayer):
    """The projections around :class:`AttentionMixer`."""

    module_name = "self_attn"

    def __init__(self, model: ModelConfig, index: int, rotary: RotaryTable, runtime: Runtime, name: str) -> None:
        super().__init__()
        config, hidden = model.layers[index].mixer, model.hidden_size
        assert isinstance(config, AttentionConfig)
        heads, dim, padding = config.num_heads, config.head_dim, config.padding
        self.qkv_proj = QkvLinear(
            hidden,
            heads,
            config.num_kv_heads,
            dim,
            config.qkv_bias,
            runtime,
            f"{name}.qkv_proj",
            padding,
            config.output_gate,
        )
        mine = self.qkv_proj.num_heads * dim
        #: Columns of the projection: qkv, and the gates if there are any.
        self.widths = [self.qkv_proj.out_features - mine, mine] if config.output_gate else []
        self.o_proj = RowLinear(
            heads * dim,
            hidden,
            config.out_bias,
            runtime,
            "num_attention_heads * head_dim",
            f"{name}.o_proj",
            padding.heads * dim,
        )
        weights = QkvWeights(rotary.cos_sin)
        if config.qk_norm:
            eps = model.rms_norm_eps
            norms = [HeadNorm(dim, eps, runtime, model.zero_centered_norms) for _ in range(2)]
            self.q_norm, self.k_norm = norms
            weights = QkvWeights(rotary.cos_sin, self.q_norm.gain, self.k_norm.gain, eps)
        qkv = QkvSpec(
            num_heads=self.qkv_proj.num_heads,
            num_kv_heads=self.qkv_proj.num_kv_heads,
            head_dim=dim,
            rotary_dim=model.rope.rotary_dim,
            interleaved=model.rope.interleaved,
            qk_norm=config.qk_norm,
            dtype=runtime.dtype,
            float32_norms=config.qk_norm and self.q_norm.gain_is_wider,
        )
        self.stored_heads, self.group = heads - padding.heads, runtime.tensor_parallel
        float32 = replace(runtime, dtype=torch.float32)  # as attention sums
        self.sinks = empty_parameter(float32, self.qkv_proj.num_heads) if config.sinks else None
        mixer = AttentionMixer(
            f"{name}.attn", index, qkv, weights, self.sinks, config.window, runtime, config.output_gate
        )
        self.attn = runtime.bind(mixer, runtime)
        self.cache_scales = CacheScales(self.attn, runtime.cache_dtype)

    def forward(self, x: torch.Tensor, positions: torch.Tensor, step: object) -> torch.Tensor:
        """``x [T, hidden]`` to ``[T, hidden]``."""
        projected = self.qkv_proj(x)
        inputs = torch.split(projected, self.widths, -1) if self.widths else (projected,)
        result: torch.Tensor = self.o_proj(self.attn(inputs, positions, step))
        return result

    def placements(self) -> Iterator[tuple[str, str, Placement]]:
        """Sinks, one value for each head, where the model has them."""
        if self.sinks is not None:
            first = self.group.rank * len(self.sinks)
            source, count, padding = stored(range(first, first + len(self.sinks)), self.stored_heads)
            shape = (self.stored_heads,)
            yield "", "sinks", Placement(self.sinks, shape, source=source, count=count, padding=padding)
