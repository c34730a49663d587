"""A checkpoint's draft layers after its last layer; each drafts one further token (multi-token prediction, MTP).

Layer ``d`` reads the hidden state at the position of token ``i`` and the embedding of token ``i + 1``. It returns the
hidden state from which the model's head predicts token ``i + 2`` (DeepSeek-V3, arXiv 2412.19437, section 2.2). The
first layer reads the model's hidden states, the next ones those of the layer before. Drafts longer than the number of
layers start again at the first. The draft shares the model's embedding and head and does not load them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

import torch
from torch import nn

from atom_core.config import ModelConfig
from atom_core.decoder_layer import DecoderLayer
from atom_core.fusion.layers import FusedLayers
from atom_core.hf_config import as_mapping
from atom_core.layers.embedding import LMHead, TokenEmbedding
from atom_core.layers.linear import Linear
from atom_core.layers.norm import RMSNorm
from atom_core.layers.parameters import MissingLayer
from atom_core.layers.rotary import RotaryTable
from atom_core.models.decoder import CheckpointModel, DecoderForCausalLM
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


class DraftStack(nn.Module):
    """The draft layers by their index in the checkpoint, and the model's embedding."""

    def __init__(self, config: ModelConfig, first: int, runtime: Runtime, name: str) -> None:
        super().__init__()
        self.embed_tokens: nn.Module = MissingLayer()
        self.rotary = RotaryTable(config.rope, runtime)
        self.layers = nn.ModuleDict(
            {
                str(first + index): DraftLayer(config, index, self.rotary, runtime, f"{name}.layers.{first + index}")
                for index in range(config.num_layers)
            }
        )


class DraftModel(CheckpointModel, ABC):
    """The draft layers of one checkpoint.

    Args:
        config: of the draft layers alone, as :meth:`from_hf` reads it.
        runtime: the draft's own.
        prefix: what module names start with, before the checkpoint's names.
    """

    borrowed = ("model.embed_tokens", "lm_head")

    def __init__(self, config: ModelConfig, runtime: Runtime, prefix: str = "") -> None:
        super().__init__()
        self.config = config
        self.first = config.layers_before
        runtime = replace(runtime, quant=runtime.quant.below(prefix))
        self.model = DraftStack(config, self.first, runtime, f"{prefix}.model" if prefix else "model")
        self.lm_head: nn.Module = MissingLayer()
        of_layers = [f"model.layers.{self.first + index}." for index in range(config.num_layers)]
        self.ignored_prefixes = (
            *(f"model.layers.{index}." for index in range(self.first)),
            "model.norm.",
            # Some checkpoints repeat the model's embedding and head.
            *(f"{layer}{copied}." for layer in of_layers for copied in ("embed_tokens", "shared_head.head")),
        )

    @classmethod
    @abstractmethod
    def family(cls) -> type[DecoderForCausalLM]:
        """The class of the model that these layers draft for."""

    @classmethod
    def from_hf(cls, source: Mapping[str, Any] | Any) -> ModelConfig:
        """The configuration of the draft layers.

        Args:
            source: the whole checkpoint's configuration, as for :func:`atom_core.models.read_config.read_model_config`.

        Raises:
            ValueError: it has no draft layers, or a value that the family cannot run.
        """
        family, values = cls.family(), as_mapping(source)
        hf = family.schema.read(values)
        count, before = family.read_config(hf).draft_layers, hf.num_hidden_layers
        if count < 1:
            raise ValueError(
                "The checkpoint has no layers to draft with (multi-token prediction): num_nextn_predict_layers="
                f"{values.get('num_nextn_predict_layers')!r} in config.json. Leave speculative decoding by them out."
            )
        whole = family.read_config(hf.model_copy(update={"num_hidden_layers": before + count}))
        return replace(whole, layers=whole.layers[before:], layers_before=before, draft_layers=0)

    def share(self, embed_tokens: TokenEmbedding, lm_head: LMHead) -> None:
        """Use the embedding and the head of the model that this drafts for."""
        self.model.embed_tokens, self.lm_head = embed_tokens, lm_head

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, hidden: torch.Tensor, step: object, depth: int = 0
    ) -> torch.Tensor:
        """Draft one token after each of a batch's tokens.

        Args:
            input_ids: ``[T]``: for each position, the token after it.
            positions: ``[T]``.
            hidden: ``[T, hidden]`` at the positions: the model's after its final norm, or the draft's previous result.
            step: passed to the attention layers unchanged.
            depth: how many tokens are drafted already; it chooses the layer.

        Returns:
            Hidden states ``[T, hidden]``, for :meth:`logits` and for the next draft.
        """
        layer = cast(DraftLayer, self.model.layers[str(self.first + depth % self.config.num_layers)])
        return layer.draft(self.model.embed_tokens(input_ids), hidden, positions, step)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """``hidden [T, hidden]`` to ``[T, vocabulary]``."""
        return cast(torch.Tensor, self.lm_head(hidden))
