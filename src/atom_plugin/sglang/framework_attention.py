"""Our models on another of SGLang's attention backends, which the user names with ``--attention-backend``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from sglang.srt.runtime_context import attention_backends

from atom_core.kernels.qk_norm_rope import QK_NORM_ROPE
from atom_core.mixers.attention import AttentionMixer
from atom_core.mixers.base import TokenMixer
from atom_core.runtime import Runtime
from atom_plugin.sglang.attention import SglangLayer, WarmUpStep, has_no_token

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch


class FrameworkAttention(SglangLayer):
    """SGLang's layer on SGLang's backend. Before it, ours norms and rotates q and k."""

    def __init__(self, mixer: TokenMixer, runtime: Runtime) -> None:
        super().__init__(mixer)
        assert isinstance(mixer, AttentionMixer), "the fallback is refused for MLA"
        self.weights = mixer.weights
        self._sinks = (mixer.sinks,)
        # As SGLang's own models hand them over.
        self._sinks_dtype = torch.float32 if "trtllm_mha" in attention_backends() else torch.bfloat16
        self.device = runtime.device
        self.prepare = runtime.kernels.select(QK_NORM_ROPE, mixer.qkv)
        self.hold_sglang_layer(mixer.qkv.num_kv_heads)

    def set_scales(self, key: float, value: float) -> None:
        """See :class:`BaseAttention`: backends read them from SGLang's layer, some as tensors, some as numbers."""
        super().set_scales(key, value)
        self.sglang_layer.k_scale, self.sglang_layer.v_scale = torch.tensor((key, value), device=self.device).unbind()
        self.sglang_layer.k_scale_float, self.sglang_layer.v_scale_float = key, value

    def forward(
        self, inputs: Sequence[torch.Tensor], positions: torch.Tensor, step: ForwardBatch | WarmUpStep
    ) -> torch.Tensor:
        """See :class:`BaseAttention`; ``step`` is SGLang's batch."""
        if not isinstance(step, WarmUpStep) and has_no_token(step):
            return self.empty_step(inputs)
        qkv, *gates = inputs
        q, k, v = self.prepare(qkv, positions, self.weights)
        if isinstance(step, WarmUpStep):  # SGLang's backend warms itself up
            return self.empty_step(inputs)
        sinks = self._sinks[0]
        others = {} if sinks is None else {"sinks": sinks.to(self._sinks_dtype)}
        attended: torch.Tensor = self.sglang_layer(q.flatten(1), k.flatten(1), v.flatten(1), step, **others)
        attended = attended.flatten(1)
        for gate in gates:
            attended = attended * gate[: len(attended)].float().sigmoid().to(attended.dtype)
        return attended
