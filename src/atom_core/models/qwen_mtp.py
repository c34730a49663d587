"""The draft layer of Qwen3-Next and Qwen3.5, under ``mtp.`` in checkpoints: one layer of full attention.

It keeps no state, although the model's other layers do. See :mod:`atom_core.models.draft`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import cast

import torch
from torch import nn

from atom_core.config import AttentionConfig, LayerConfig, ModelConfig
from atom_core.decoder_layer import DecoderLayer
from atom_core.fusion.layers import FusedLayers
from atom_core.layers.linear import Linear
from atom_core.layers.norm import RMSNorm
from atom_core.layers.rotary import RotaryTable
from atom_core.models.decoder import DecoderForCausalLM
from atom_core.models.draft import DraftInputs, DraftModel
from atom_core.models.qwen3_5 import VISION_PREFIXES, Qwen3_5ForCausalLM, Qwen3_5MoeForCausalLM, Qwen35Keys
from atom_core.models.qwen3_next import HybridKeys, Qwen3NextForCausalLM
from atom_core.runtime import Runtime


class DraftLayers(nn.Module):
    """``norm(layer(fc(pre_fc_norm_embedding(embedding), pre_fc_norm_hidden(hidden))))``, the layer one of several."""

    def __init__(self, config: ModelConfig, rotary: RotaryTable, runtime: Runtime, name: str) -> None:
        super().__init__()
        size = config.hidden_size
        norm = partial(RMSNorm, size, config.rms_norm_eps, runtime, config.zero_centered_norms)
        self.pre_fc_norm_embedding, self.pre_fc_norm_hidden, self.norm = norm(), norm(), norm()
        self.fc = Linear(2 * size, size, False, runtime, f"{name}.fc")
        self.layers = nn.ModuleList(
            DecoderLayer(config, index, rotary, runtime, f"{name}.layers.{index}") for index in range(config.num_layers)
        )
        self.fused = [
            FusedLayers([cast(DecoderLayer, layer)], self.norm, runtime) if runtime.fuse_modules else None
            for layer in self.layers
        ]

    def draft(
        self, embedded: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor, step: object, index: int
    ) -> torch.Tensor:
        """See :meth:`DraftModel.draft`."""
        of_token, of_model = self.pre_fc_norm_embedding(embedded)[0], self.pre_fc_norm_hidden(hidden)[0]
        x, fused = self.fc(torch.cat([of_token, of_model], -1)), self.fused[index]
        if fused is not None and not fused.has_hooks:
            return fused(x, None, positions, step)[0]
        normed, _ = self.norm(*self.layers[index](x, None, positions, step))
        return cast(torch.Tensor, normed)


class Qwen3NextDraft(DraftModel):
    """Of Qwen3-Next."""

    ignored_prefixes: tuple[str, ...] = ("model.",)

    def __init__(self, config: ModelConfig, runtime: Runtime, prefix: str = "") -> None:
        super().__init__(config, runtime, prefix)
        self.model = DraftInputs(config, self.runtime)
        self.mtp = DraftLayers(config, self.model.rotary, self.runtime, f"{prefix}.mtp" if prefix else "mtp")

    @classmethod
    def family(cls) -> type[DecoderForCausalLM]:
        """See :class:`DraftModel`."""
        return Qwen3NextForCausalLM

    @classmethod
    def of_layers(cls, hf: HybridKeys) -> ModelConfig:
        """See :class:`DraftModel`."""
        whole, given = cls.family().read_config(hf), getattr(hf, cls.count_key)
        # Qwen3-Next's published configurations do not say that there is one.
        count = 1 if given is None else given
        attention = next(it.mixer for it in whole.layers if isinstance(it.mixer, AttentionConfig))
        mixture = next((it.moe for it in whole.layers if it.moe is not None), None)
        layers = (LayerConfig(attention, mixture),) * count
        return replace(whole, layers=layers, layers_before=whole.num_layers)

    @property
    def layers(self) -> Sequence[DecoderLayer]:
        """See :class:`DraftModel`."""
        return [cast(DecoderLayer, layer) for layer in self.mtp.layers]

    @property
    def own_prefix(self) -> str:
        """See :class:`DraftModel`."""
        return "mtp."

    def draft(
        self, embedded: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor, step: object, index: int
    ) -> torch.Tensor:
        """See :class:`DraftModel`."""
        return self.mtp.draft(embedded, hidden, positions, step, index)


class Qwen35Draft(Qwen3NextDraft):
    """Of Qwen3.5, dense."""

    count_key = "mtp_num_hidden_layers"
    ignored_prefixes = ("model.", *VISION_PREFIXES)

    @classmethod
    def family(cls) -> type[DecoderForCausalLM]:
        """See :class:`DraftModel`."""
        return Qwen3_5ForCausalLM

    @classmethod
    def of_layers(cls, hf: HybridKeys) -> ModelConfig:
        """See :class:`DraftModel`.

        Raises:
            ValueError: the draft has an embedding of its own.
        """
        assert isinstance(hf, Qwen35Keys)
        if hf.mtp_use_dedicated_embeddings:
            raise ValueError("mtp_use_dedicated_embeddings=true is not supported; supported: false, or leave it out.")
        return super().of_layers(hf)


class Qwen35MoeDraft(Qwen35Draft):
    """Of Qwen3.5's mixture of experts."""

    @classmethod
    def family(cls) -> type[DecoderForCausalLM]:
        """See :class:`DraftModel`."""
        return Qwen3_5MoeForCausalLM
