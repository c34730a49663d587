"""Our models on vLLM's own attention layer (``ATOM_DISABLE_VLLM_ATTENTION=1``)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.attention import Attention as VllmAttention

from atom_core.kernels.qk_norm_rope import QK_NORM_ROPE
from atom_core.mixers.attention import AttentionMixer
from atom_core.mixers.base import BaseAttention, TokenMixer
from atom_core.runtime import Runtime


class FrameworkAttention(BaseAttention):
    """vLLM's attention layer on the platform's backend. Before it, ours norms and rotates q and k."""

    def __init__(self, mixer: TokenMixer, runtime: Runtime) -> None:
        super().__init__(mixer)
        assert isinstance(mixer, AttentionMixer), "the fallback is refused for MLA"
        qkv, sinks = mixer.qkv, mixer.sinks
        self.weights = mixer.weights
        # Backends want sinks in the model's dtype; ours stay as they are loaded.
        self.sinks = None if sinks is None else (sinks, torch.empty_like(sinks, dtype=runtime.dtype))
        self.prepare = runtime.kernels.select(QK_NORM_ROPE, qkv)
        self.attention = VllmAttention(
            qkv.num_heads,
            qkv.head_dim,
            mixer.scale,
            num_kv_heads=qkv.num_kv_heads,
            cache_config=get_current_vllm_config().cache_config,
            quant_config=None,
            logits_soft_cap=mixer.soft_cap,
            per_layer_sliding_window=mixer.window,
            prefix=mixer.name,
            **({} if self.sinks is None else {"sinks": self.sinks[1]}),
        )

    def set_scales(self, key: float, value: float) -> None:
        """See :class:`BaseAttention`: backends read them from vLLM's layer, some as tensors, some as numbers."""
        super().set_scales(key, value)
        layer = self.attention
        for scale, on_device, on_host in (
            (key, layer._k_scale, layer._k_scale_cpu),
            (value, layer._v_scale, layer._v_scale_cpu),
        ):
            on_device.fill_(scale)
            on_host.fill_(scale)
        layer._k_scale_float, layer._v_scale_float = key, value

    def hand_over(self) -> None:
        """After loading: give vLLM's layer the sinks, and the scales again, which it has reset to 1."""
        self.set_scales(self.mixer.k_scale, self.mixer.v_scale)
        if self.sinks is not None:
            loaded, given = self.sinks
            given.copy_(loaded)

    def forward(self, inputs: Sequence[torch.Tensor], positions: torch.Tensor, step: object = None) -> torch.Tensor:
        """See :class:`BaseAttention`."""
        (qkv,) = inputs
        q, k, v = self.prepare(qkv, positions, self.weights)
        attended: torch.Tensor = self.attention(q.flatten(1), k.flatten(1), v.flatten(1))
        return attended
