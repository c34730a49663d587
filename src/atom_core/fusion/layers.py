"""A model's layers on the residual stream, each a fused token mixer and a fused feed-forward network."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeAlias

import torch
from torch import nn

from atom_core.decoder_layer import DecoderLayer
from atom_core.fusion.linear import NormedLinear, NormedLinearAndGates, ResidualLinear, Stream, StreamNorm
from atom_core.fusion.mlp import FusedMLP
from atom_core.fusion.moe import FusedMoE
from atom_core.layers.mlp import GatedMLP
from atom_core.layers.moe import MoE
from atom_core.layers.norm import RMSNorm
from atom_core.mixers.attention import Attention
from atom_core.mixers.gated_delta_net import GatedDeltaNet
from atom_core.mixers.mla import MultiHeadLatentAttention
from atom_core.runtime import Runtime


class FusedAttention:
    """A norm and the attention after it, added to the stream."""

    def __init__(self, norm: StreamNorm, attention: Attention, runtime: Runtime) -> None:
        self.qkv = NormedLinear(norm, attention.qkv_proj, None, runtime)
        self.attn, self.out, self.widths = attention.attn, ResidualLinear(attention.o_proj), attention.widths

    def __call__(self, stream: Stream, positions: torch.Tensor, step: object) -> Stream:
        """The stream after attention."""
        projected, residual = self.qkv(stream)
        inputs = torch.split(projected, self.widths, -1) if self.widths else (projected,)
        return self.out(self.attn(inputs, positions, step), residual)


def _by_one_product(
    projection: NormedLinear, widths: list[int], stream: Stream
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    projected, residual = projection(stream)
    qkvz, ba = torch.split(projected, widths, -1)
    return qkvz, ba, residual


class FusedGatedDeltaNet:
    """A norm and the linear attention (Gated DeltaNet) after it, added to the stream."""

    def __init__(self, norm: StreamNorm, mixer: GatedDeltaNet, runtime: Runtime) -> None:
        #: From the stream to ``qkvz``, ``ba`` and the updated stream.
        self.project: Callable[[Stream], tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
        if mixer.in_proj_ba is None:
            self.project = partial(_by_one_product, NormedLinear(norm, mixer.in_proj, None, runtime), mixer.widths)
        else:
            self.project = NormedLinearAndGates(norm, mixer.in_proj, mixer.in_proj_ba, runtime)
        self.attn, self.out = mixer.attn, ResidualLinear(mixer.out_proj)

    def __call__(self, stream: Stream, positions: torch.Tensor, step: object) -> Stream:
        """The stream after linear attention."""
        qkvz, ba, residual = self.project(stream)
        return self.out(self.attn((qkvz, ba), positions, step), residual)


class FusedMLA:
    """A norm and the latent attention (MLA) after it, added to the stream."""

    def __init__(self, norm: StreamNorm, attention: MultiHeadLatentAttention, runtime: Runtime) -> None:
        self.down = NormedLinear(norm, attention.fused_qkv_a_proj_with_mqa, None, runtime)
        self.widths = attention.widths
        #: From compressed queries to queries; None: queries are not compressed.
        self.queries = (
            NormedLinear(StreamNorm(attention.q_a_layernorm, runtime), attention.q_b_proj, None, runtime)
            if attention.compressed
            else None
        )
        self.attn, self.out = attention.attn, ResidualLinear(attention.o_proj)

    def __call__(self, stream: Stream, positions: torch.Tensor, step: object) -> Stream:
        """The stream after attention."""
        down, residual = self.down(stream)
        q, latent = torch.split(down, self.widths, -1)
        if self.queries is not None:
            q, _ = self.queries(Stream(None, q))
        return self.out(self.attn((q, latent), positions, step), residual)


FusedMixer: TypeAlias = FusedAttention | FusedMLA | FusedGatedDeltaNet
FusedFeedForward: TypeAlias = FusedMLP | FusedMoE


def fused_mixer(norm: RMSNorm, mixer: nn.Module, runtime: Runtime) -> FusedMixer:
    """Fuse ``norm`` and the token mixer after it."""
    if isinstance(mixer, Attention):
        return FusedAttention(StreamNorm(norm, runtime), mixer, runtime)
    if isinstance(mixer, GatedDeltaNet):
        return FusedGatedDeltaNet(StreamNorm(norm, runtime), mixer, runtime)
    assert isinstance(mixer, MultiHeadLatentAttention)
    return FusedMLA(StreamNorm(norm, runtime), mixer, runtime)


def fused_feed_forward(norm: RMSNorm, network: nn.Module, runtime: Runtime) -> FusedFeedForward:
    """Fuse ``norm`` and the feed-forward network after it."""
    if isinstance(network, MoE):
        return FusedMoE(StreamNorm(norm, runtime), network, runtime)
    assert isinstance(network, GatedMLP)
    return FusedMLP(StreamNorm(norm, runtime), network, runtime)


class FusedLayers:
    """Consecutive layers and the final norm, run in place of their modules' own calls.

    Args:
        layers: this rank's.
        norm: after the last layer; None: another pipeline stage has it.
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
        #: Called with each layer's index in this object and the stream after it, ``[T, hidden]``; None: not called.
        self.observer: Callable[[int, torch.Tensor], None] | None = None
        self.norm, self.group = None if norm is None else StreamNorm(norm, runtime), runtime.tensor_parallel

    @property
    def has_hooks(self) -> bool:
        """Whether a module has a hook, so that it must run by its own call.

        Compiled code has none, because it is traced once.
        """
        return not torch.compiler.is_compiling() and any(self._hooks)

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor | None, positions: torch.Tensor, step: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As :meth:`DecoderLayer.forward` of all layers, and the norm; it writes to ``x`` and ``residual``."""
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
