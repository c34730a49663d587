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
from atom_plugin.sglang.replicas import STAND_IN


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
        count, carried = len(positions), None
        # SGLang captures the first stage's graphs with tensors in the place of what a stage before would carry.
        if pp_proxy_tensors is not None and not self.core.model.is_first:
            hidden, residual = pp_proxy_tensors["hidden_states"], pp_proxy_tensors["residual"]
            carried = Carried(or_stand_in(hidden), or_stand_in(residual))
        ids, embeds = (None if each is None else or_stand_in(each) for each in (input_ids, input_embeds))
        result = self.core(ids, or_stand_in(positions), forward_batch, embeds, carried)
        if isinstance(result, Carried):
            return PPProxyTensors({"hidden_states": result.hidden[:count], "residual": result.residual[:count]})
        hidden = result
        return hidden if count else hidden[:0]


def or_stand_in(rows: torch.Tensor) -> torch.Tensor:
    """``rows``, or something in the place of none: a rank without requests takes part in what others exchange."""
    return rows if len(rows) else rows.new_zeros(STAND_IN, *rows.shape[1:])


def _host(layer: nn.Module) -> RadixAttention | None:
    attention = getattr(layer, "self_attn", None)
    return None if attention is None else attention.attn.host
