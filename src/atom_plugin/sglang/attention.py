"""The core's attention layers over SGLang's ``RadixAttention`` objects.

SGLang's layer object is the channel to whatever backend the step runs on. It trims padded rows and steps out of
captured prefill graphs, so ours goes through it too, and hands its raw qkv along for the fused step in our backend.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from sglang.srt.layers.radix_attention import RadixAttention as HostAttention
from sglang.srt.runtime_context import attention_backends

from atom_core.attention.base import AttentionSpec, BaseAttention, CachedStep, RadixAttention
from atom_core.attention.mla import LatentStep, MlaLayerSpec, RadixMlaAttention
from atom_core.kernels.mla_cache import MlaWeights
from atom_core.kernels.qk_norm_rope import QK_NORM_ROPE, QkvWeights
from atom_core.runtime import Runtime

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch


def has_no_token(step: ForwardBatch) -> bool:
    """Whether all rows are there for the other ranks' sake: of an idle step, or of one that SGLang has made a prompt.

    Such a prompt may be longer than any sequence, so there are no pages to read for it.
    """
    mode = step.forward_mode
    if mode.is_idle():
        return True
    return mode.is_extend() and not mode.is_target_verify() and step.global_num_token_non_padded_cpu == 0


def _host_layer(spec: AttentionSpec) -> HostAttention:
    return HostAttention(
        spec.qkv.num_heads,
        spec.qkv.head_dim,
        spec.scale,
        spec.qkv.num_kv_heads,
        layer_id=spec.layer_index,
        logit_cap=spec.soft_cap or 0.0,
        # SGLang counts the tokens before the query's own.
        sliding_window_size=-1 if spec.window is None else spec.window - 1,
        prefix=spec.name,
    )


class Hosted:
    """A layer behind one of SGLang's, which is no module of it: ``self_attn.attn`` is one module, as in SGLang."""

    def hold_host(self, host: HostAttention) -> None:
        """Called once, when the layer is built."""
        self._host = (host,)

    @property
    def host(self) -> HostAttention:
        """SGLang's."""
        return self._host[0]

    @property
    def layer_id(self) -> int:
        """By which SGLang sorts attention layers when it captures graphs."""
        return int(self.host.layer_id)


class SglangRadixAttention(Hosted, RadixAttention):
    """An attention layer on our backend."""

    def __init__(self, spec: AttentionSpec, weights: QkvWeights, sinks: torch.Tensor | None, runtime: Runtime) -> None:
        super().__init__(spec, weights, sinks, runtime)
        self.hold_host(_host_layer(spec))
        qkv = spec.qkv
        self.widths = [heads * qkv.head_dim for heads in (qkv.num_heads, qkv.num_kv_heads, qkv.num_kv_heads)]

    def forward(  # type: ignore[override]
        self, qkv: torch.Tensor, positions: torch.Tensor, step: ForwardBatch
    ) -> torch.Tensor:
        """See :class:`BaseAttention`; ``step`` is SGLang's batch."""
        if has_no_token(step):
            return qkv.new_zeros(qkv.shape[0], self.widths[0])  # a router reads on
        q, k, v = qkv.split(self.widths, dim=1)
        attended: torch.Tensor = self.host(q, k, v, step, atom_layer=self, atom_inputs=(qkv, positions))
        return attended

    def attend(self, inputs: Sequence[torch.Tensor], step: CachedStep, out: torch.Tensor | None) -> torch.Tensor:
        """What our backend calls when SGLang's layer has reached it: the fused step, into ``out`` if there is such."""
        qkv, positions = inputs
        return RadixAttention.forward(self, qkv, positions, step, out)


class SglangMlaAttention(Hosted, RadixMlaAttention):
    """An attention layer over latents, on our backend."""

    def __init__(self, spec: MlaLayerSpec, weights: MlaWeights, runtime: Runtime) -> None:
        super().__init__(spec, weights, runtime)
        shape = spec.latent
        host = HostAttention(
            shape.num_heads,
            shape.nope_dim + shape.rope_dim,
            spec.attention.scale,
            1,
            layer_id=spec.layer_index,
            v_head_dim=shape.value_dim,
            prefix=spec.name,
        )
        self.hold_host(host)

    def forward(  # type: ignore[override]
        self, q: torch.Tensor, latent: torch.Tensor, positions: torch.Tensor, step: ForwardBatch
    ) -> torch.Tensor:
        """See :class:`BaseMlaAttention`; ``step`` is SGLang's batch."""
        if has_no_token(step):
            return self.empty(q).zero_().flatten(1)
        inputs = (q, latent, positions)
        attended: torch.Tensor = self.host(q, None, None, step, atom_layer=self, atom_inputs=inputs)
        return attended

    def attend(self, inputs: Sequence[torch.Tensor], step: LatentStep, out: torch.Tensor | None) -> torch.Tensor:
        """See :class:`SglangRadixAttention`."""
        q, latent, positions = inputs
        return RadixMlaAttention.forward(self, q, latent, positions, step, out)


class FrameworkAttention(Hosted, BaseAttention):
    """Our model on another of SGLang's backends, named by the user with ``--attention-backend``."""

    def __init__(self, spec: AttentionSpec, weights: QkvWeights, sinks: torch.Tensor | None, runtime: Runtime) -> None:
        super().__init__(spec)
        self.weights = weights
        self._sinks = (sinks,)
        # As SGLang's own models hand them over.
        self._sinks_dtype = torch.float32 if "trtllm_mha" in attention_backends() else torch.bfloat16
        self.device = runtime.device
        self.prepare = runtime.kernels.select(QK_NORM_ROPE, spec.qkv)
        self.hold_host(_host_layer(spec))

    def set_scales(self, key: float, value: float) -> None:
        """See :class:`BaseAttention`: backends read them from SGLang's layer, some as tensors, some as numbers."""
        super().set_scales(key, value)
        self.host.k_scale, self.host.v_scale = torch.tensor((key, value), device=self.device).unbind()
        self.host.k_scale_float, self.host.v_scale_float = key, value

    def forward(self, qkv: torch.Tensor, positions: torch.Tensor, step: ForwardBatch) -> torch.Tensor:
        """See :class:`BaseAttention`; ``step`` is SGLang's batch."""
        if has_no_token(step):
            return qkv.new_zeros(qkv.shape[0], self.host.tp_q_head_num * self.host.v_head_dim)
        q, k, v = self.prepare(qkv, positions, self.weights)
        sinks = self._sinks[0]
        others = {} if sinks is None else {"sinks": sinks.to(self._sinks_dtype)}
        attended: torch.Tensor = self.host(q.flatten(1), k.flatten(1), v.flatten(1), step, **others)
        return attended.flatten(1)
