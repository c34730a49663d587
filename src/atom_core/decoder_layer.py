"""A decoder layer: norm, token mixer, norm, feed-forward network, each half added to the residual stream."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

from atom_core.config import ModelConfig
from atom_core.layers.mlp import GatedMLP
from atom_core.layers.moe import MoE
from atom_core.layers.norm import RMSNorm
from atom_core.layers.rotary import RotaryTable
from atom_core.mixers import MIXERS
from atom_core.runtime import Runtime


class DecoderLayer(nn.Module):
    """See the module's text; :mod:`atom_core.fusion` runs it by fewer kernels."""

    def __init__(self, config: ModelConfig, index: int, rotary: RotaryTable, runtime: Runtime, name: str) -> None:
        super().__init__()
        layer, size = config.layers[index], config.hidden_size
        norm = partial(RMSNorm, size, config.rms_norm_eps, runtime, config.zero_centered_norms)
        self.input_layernorm = norm()
        mixer = MIXERS[type(layer.mixer)]
        #: What checkpoints call the mixer.
        self.mixer_name = mixer.module_name
        self.add_module(self.mixer_name, mixer(config, index, rotary, runtime, f"{name}.{self.mixer_name}"))
        self.post_attention_layernorm = norm()
        #: What checkpoints call the feed-forward network.
        self.feed_forward_name = "mlp" if layer.moe is None else layer.moe.names.module
        module_name = f"{name}.{self.feed_forward_name}"
        self.add_module(
            self.feed_forward_name,
            GatedMLP(config, runtime, module_name)
            if layer.moe is None
            else MoE(layer.moe, size, config.activation, runtime, module_name, index),
        )

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None, positions: torch.Tensor, step: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One layer of the residual stream.

        Args:
            x: ``[T, hidden]``, what the layer before adds to the stream; without ``residual``, the stream.
            residual: ``[T, hidden]``, the stream before that.
            positions: ``[T]``.
            step: handed to the token mixer as it is.

        Returns:
            What this layer's network adds, and the stream before that.
        """
        x, residual = self.input_layernorm(x, residual)
        x = self.mixer(x, positions, step)
        x, residual = self.post_attention_layernorm(x, residual)
        x = self.feed_forward(x)
        assert residual is not None
        return x, residual

    @property
    def mixer(self) -> nn.Module:
        """The token mixer, of :mod:`atom_core.mixers`."""
        module: nn.Module = getattr(self, self.mixer_name)
        return module

    @property
    def feed_forward(self) -> nn.Module:
        """The network behind attention."""
        module: nn.Module = getattr(self, self.feed_forward_name)
        return module
