"""A model's layers as they run: each a fused token mixer and a fused feed-forward network on the residual stream."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch import nn

from atom_core.fusion.attention import FusedAttention, FusedLatentAttention
from atom_core.fusion.mlp import FusedMLP
from atom_core.fusion.moe import FusedMoE
from atom_core.fusion.stream import Stream, StreamNorm
from atom_core.layers.attention import Attention
from atom_core.layers.decoder_layer import DecoderLayer
from atom_core.layers.mla import LatentAttention
from atom_core.layers.mlp import GatedMLP
from atom_core.layers.moe import MoE
from atom_core.layers.norm import RMSNorm
from atom_core.runtime import Runtime

FusedMixer: TypeAlias = FusedAttention | FusedLatentAttention
FusedFeedForward: TypeAlias = FusedMLP | FusedMoE


def fused_mixer(norm: RMSNorm, mixer: nn.Module, runtime: Runtime) -> FusedMixer:
    """``norm`` and the token mixer behind it."""
    if isinstance(mixer, Attention):
        return FusedAttention(StreamNorm(norm, runtime), mixer, runtime)
    assert isinstance(mixer, LatentAttention)
    return FusedLatentAttention(StreamNorm(norm, runtime), mixer, runtime)


def fused_feed_forward(norm: RMSNorm, network: nn.Module, runtime: Runtime) -> FusedFeedForward:
    """``norm`` and the feed-forward network behind it."""
    if isinstance(network, MoE):
        return FusedMoE(StreamNorm(norm, runtime), network, runtime)
    assert isinstance(network, GatedMLP)
    return FusedMLP(StreamNorm(norm, runtime), network, runtime)


class FusedLayers:
    """Consecutive layers and the norm behind the last, run in the place of their modules' own calls.

    Args:
        layers: this rank's.
        norm: behind the last; None: another pipeline stage has it.
        runtime: the model's.
    """

    def __init__(self, layers: Sequence[DecoderLayer], norm: RMSNorm | None, runtime: Runtime) -> None:
        self.layers = [
            (
                fused_mixer(layer.input_layernorm, layer.self_attn, runtime),
                fused_feed_forward(layer.post_attention_layernorm, layer.feed_forward, runtime),
            )
            for layer in layers
        ]
        #: Given each layer's place among these and the stream behind it, ``[T, hidden]``; None: nobody looks.
        self.observer: Callable[[int, torch.Tensor], None] | None = None
        self.norm, self.group = None if norm is None else StreamNorm(norm, runtime), runtime.tensor_parallel

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor | None, positions: torch.Tensor, step: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As the layers' own: see :meth:`DecoderLayer.forward`, and the norm's. It writes to ``x`` and ``residual``."""
        stream = Stream(None, x) if residual is None else Stream(x, residual)
        for index, (mixer, feed_forward) in enumerate(self.layers):
            stream = feed_forward(mixer(stream, positions, step))
            if self.observer is not None:
                self.observer(index, self._summed(stream))
        if self.norm is not None:
            return self.norm(stream)
        last, residual, is_partial = stream
        if last is None:
            return torch.zeros_like(residual), residual
        return self.group.all_reduce(last) if is_partial else last, residual

    def _summed(self, stream: Stream) -> torch.Tensor:
        last, residual, is_partial = stream
        if last is None:
            return residual.clone()
        return residual + (self.group.all_reduce(last) if is_partial else last)
