"""The draft layer of DeepSeek V3 and R1 (MLA and experts, as the model's layers), numbered after the model's last.

See :mod:`atom_core.models.draft`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import cast

import torch
from torch import nn

from atom_core.config import ModelConfig
from atom_core.decoder_layer import DecoderLayer
from atom_core.fusion.layers import FusedLayers
from atom_core.layers.linear import Linear
from atom_core.layers.norm import RMSNorm
from atom_core.layers.rotary import RotaryTable
from atom_core.models.deepseek import DeepseekKeys, DeepseekV3ForCausalLM
from atom_core.models.draft import DraftInputs, DraftModel
from atom_core.quant import Fp8Config, Unquantized
from atom_core.runtime import Runtime


class SharedHead(nn.Module):
    """The norm before the model's head, under its name in checkpoints."""

    def __init__(self, config: ModelConfig, runtime: Runtime) -> None:
        super().__init__()
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, runtime)


class DraftLayer(DecoderLayer):
    """``norm(layer(eh_proj(enorm(embedding), hnorm(hidden))))``."""

    def __init__(self, config: ModelConfig, index: int, rotary: RotaryTable, runtime: Runtime, name: str) -> None:
        super().__init__(config, index, rotary, runtime, name)
        size = config.hidden_size
        self.enorm = RMSNorm(size, config.rms_norm_eps, runtime)
        self.hnorm = RMSNorm(size, config.rms_norm_eps, runtime)
        self.eh_proj = Linear(2 * size, size, False, _of_entry(runtime, f"{name}.eh_proj"), f"{name}.eh_proj")
        self.shared_head = SharedHead(config, runtime)
        self.fused = FusedLayers([self], self.shared_head.norm, runtime) if runtime.fuse_modules else None

    def draft(
        self, embedded: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor, step: object
    ) -> torch.Tensor:
        """``embedded`` and ``hidden``, both ``[T, hidden]`` and not written to, to hidden states ``[T, hidden]``."""
        of_token, of_model = self.enorm(embedded)[0], self.hnorm(hidden)[0]
        x, residual = self.eh_proj(torch.cat([of_token, of_model], -1)), None
        if self.fused is not None and not self.fused.has_hooks:
            return self.fused(x, residual, positions, step)[0]
        normed, _ = self.shared_head.norm(*self(x, residual, positions, step))
        return cast(torch.Tensor, normed)


def _of_entry(runtime: Runtime, name: str) -> Runtime:
    """The runtime for ``eh_proj``, which DeepSeek's FP8 checkpoints do not quantise and do not list as ignored."""
    scheme = runtime.quant.linear([name])
    silent = isinstance(scheme, Fp8Config) and scheme.block and scheme.scale == "weight_scale_inv"
    return replace(runtime, quant=Unquantized()) if silent else runtime


class DraftStack(DraftInputs):
    """The draft layers by their index in the checkpoint."""

    def __init__(self, config: ModelConfig, first: int, runtime: Runtime, name: str) -> None:
        super().__init__(config, runtime)
        self.layers = nn.ModuleDict(
            {
                str(first + index): DraftLayer(config, index, self.rotary, runtime, f"{name}.layers.{first + index}")
                for index in range(config.num_layers)
            }
        )


class DeepseekV3Draft(DraftModel):
    """See the module's text."""

    model: DraftStack

    def __init__(self, config: ModelConfig, runtime: Runtime, prefix: str = "") -> None:
        super().__init__(config, runtime, prefix)
        self.first = config.layers_before
        self.model = DraftStack(config, self.first, self.runtime, f"{prefix}.model" if prefix else "model")
        of_layers = [f"model.layers.{self.first + index}." for index in range(config.num_layers)]
        self.ignored_prefixes = (
            *(f"model.layers.{index}." for index in range(self.first)),
            "model.norm.",
            # Some checkpoints repeat the model's embedding and head.
            *(f"{layer}{copied}." for layer in of_layers for copied in ("embed_tokens", "shared_head.head")),
        )

    @classmethod
    def family(cls) -> type[DeepseekV3ForCausalLM]:
        """See :class:`DraftModel`."""
        return DeepseekV3ForCausalLM

    @classmethod
    def of_layers(cls, hf: DeepseekKeys) -> ModelConfig:
        """See :class:`DraftModel`."""
        count, before = hf.num_nextn_predict_layers, hf.num_hidden_layers
        whole = cls.family().read_config(hf.model_copy(update={"num_hidden_layers": before + count}))
        return replace(whole, layers=whole.layers[before:], layers_before=before, draft_layers=0)

    @property
    def layers(self) -> Sequence[DecoderLayer]:
        """See :class:`DraftModel`."""
        return [cast(DecoderLayer, layer) for layer in self.model.layers.values()]

    @property
    def own_prefix(self) -> str:
        """See :class:`DraftModel`."""
        return f"model.layers.{self.first}."

    def draft(
        self, embedded: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor, step: object, index: int
    ) -> torch.Tensor:
        """See :class:`DraftModel`."""
        layer = cast(DraftLayer, self.model.layers[str(self.first + index)])
        return layer.draft(embedded, hidden, positions, step)
