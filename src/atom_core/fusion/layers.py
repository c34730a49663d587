"""A model's layers as they run: on the residual stream, a fused token mixer and a fused feed-forward network each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch import nn

from atom_core.decoder_layer import DecoderLayer
from atom_core.fusion.linear import NormedLinear, ResidualLinear, Stream, StreamNorm
from atom_core.fusion.mlp import FusedMLP
from atom_core.fusion.moe import FusedMoE
from atom_core.layers.mlp import GatedMLP
from atom_core.layers.moe import MoE
from atom_core.layers.norm import RMSNorm
from atom_core.mixers.attention import Attention
from atom_core.mixers.mla import MultiHeadLatentAttention
from atom_core.runtime import Runtime


class FusedAttention:
    """A norm and the attention behind it, which adds to the stream."""

    def __init__(self, norm: StreamNorm, attention: Attention, runtime: Runtime) -> None:
        self.qkv = NormedLinear(norm, attention.qkv_proj, None, runtime)
        self.attn, self.out = attention.attn, ResidualLinear(attention.o_proj)

    def __call__(self, stream: Stream, positions: torch.Tensor, step: object) -> Stream:
        """The stream behind it."""
        qkv, residual = self.qkv(stream)
        return self.out(self.attn((qkv,), positions, step), residual)


class FusedMLA:
    """The same over latents (MLA)."""

    def __init__(self, norm: StreamNorm, attention: MultiHeadLatentAttention, runtime: Runtime) -> None:
        self.down = NormedLinear(norm, attention.fused_qkv_a_proj_with_mqa, None, runtime)
        self.widths = attention.widths
        #: From compressed queries to queries; None: they are not compressed.
        self.queries = (
            NormedLinear(StreamNorm(attention.q_a_layernorm, runtime), attention.q_b_proj, None, runtime)
            if attention.compressed
            else None
        )
        self.attn, self.out = attention.attn, ResidualLinear(attention.o_proj)

    def __call__(self, stream: Stream, positions: torch.Tensor, step: object) -> Stream:
        """The stream behind it."""
        down, residual = self.down(stream)
        q, latent = torch.split(down, self.widths, -1)
        if self.queries is not None:
            q, _ = self.queries(Stream(None, q))
        return self.out(self.attn((q, latent), positions, step), residual)


FusedMixer: TypeAlias = FusedAttention | FusedMLA
FusedFeedForward: TypeAlias = FusedMLP | FusedMoE


def fused_mixer(norm: RMSNorm, mixer: nn.Module, runtime: Runtime) -> FusedMixer:
    """``norm`` and the token mixer behind it."""
    if isinstance(mixer, Attention):
        return FusedAttention(StreamNorm(norm, runtime), mixer, runtime)
    assert isinstance(mixer, MultiHeadLatentAttention)
    return FusedMLA(StreamNorm(norm, runtime), mixer, runtime)


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
                fused_mixer(layer.input_layernorm, layer.mixer, runtime),
                fused_feed_forward(layer.post_attention_layernorm, layer.feed_forward, runtime),
            )
            for layer in layers
        ]
        modules = [it for layer in layers for it in layer.modules() if it is not layer.mixer.attn]
        modules += [] if norm is None else [norm]
        self._hooks = [hooks for it in modules for hooks in (it._forward_hooks, it._forward_pre_hooks)]
        #: Given each layer's place among these and the stream behind it, ``[T, hidden]``; None: nobody looks.
        self.observer: Callable[[int, torch.Tensor], None] | None = None
        self.norm, self.group = None if norm is None else StreamNorm(norm, runtime), runtime.tensor_parallel

    @property
    def has_hooks(self) -> bool:
        """Whether someone has put a hook on one of the modules, which is then to run by its own call.

        What is compiled has none: it is traced once.
        """
        return not torch.compiler.is_compiling() and any(self._hooks)

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
        last, residual, _ = stream.whole(self.group)
        return torch.zeros_like(residual) if last is None else last, residual

    def _summed(self, stream: Stream) -> torch.Tensor:
        last, residual, _ = stream.whole(self.group)
        return residual.clone() if last is None else residual + last
