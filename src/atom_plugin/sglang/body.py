"""The part of a model that SGLang captures prefill graphs of: everything but the head.

SGLang looks for it in a model's ``model``, takes the attention layers from ``layers``, and while it replays puts a
function of its own in the place of ``forward``.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, PPProxyTensors
from torch import nn

from atom_core.models.decoder import Carried, DecoderForCausalLM


@dataclass(frozen=True)
class AttentionOf:
    """A layer's attention, where SGLang looks for it; None in layers of other pipeline stages."""

    attn: RadixAttention | None


@dataclass(frozen=True)
class LayerOf:
    """A decoder layer as SGLang looks at it."""

    self_attn: AttentionOf


@dataclass
class Body:
    """See the module's text. It is no module: the parameters are the core's, under the core's names."""

    core: DecoderForCausalLM
    layers: list[LayerOf] = field(init=False)

    def __post_init__(self) -> None:
        self.layers = [LayerOf(AttentionOf(_host(layer))) for layer in self.core.model.layers]

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        forward_batch: ForwardBatch,
        input_embeds: torch.Tensor | None = None,
        pp_proxy_tensors: PPProxyTensors | None = None,
    ) -> torch.Tensor | PPProxyTensors:
        """Hidden states ``[T, hidden]`` after the final norm; before the last stage, what it carries on."""
        carried = None
        if pp_proxy_tensors is not None:
            carried = Carried(pp_proxy_tensors["hidden_states"], pp_proxy_tensors["residual"])
        result = self.core(input_ids, positions, forward_batch, input_embeds, carried)
        if isinstance(result, Carried):
            return PPProxyTensors({"hidden_states": result.hidden, "residual": result.residual})
        hidden: torch.Tensor = result
        return hidden


def _host(layer: nn.Module) -> RadixAttention | None:
    attention = getattr(layer, "self_attn", None)
    return None if attention is None else attention.attn.host
