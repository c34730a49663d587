"""The draft layers of a checkpoint, each of which drafts one further token (multi-token prediction, MTP).

Layer ``d`` reads the hidden state at the position of token ``i`` and the embedding of token ``i + 1``. It returns the
hidden state from which the model's head predicts token ``i + 2`` (DeepSeek-V3, arXiv 2412.19437, section 2.2). The
first layer reads the model's hidden states, the next ones those of the layer before. Drafts longer than the number of
layers start again at the first. The draft shares the model's embedding and head and does not load them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, cast

import torch
from torch import nn

from atom_core.config import ModelConfig
from atom_core.decoder_layer import DecoderLayer
from atom_core.hf_config import HfConfig, as_mapping
from atom_core.layers.embedding import LMHead, TokenEmbedding
from atom_core.layers.parameters import MissingLayer
from atom_core.layers.rotary import RotaryTable
from atom_core.models.decoder import CheckpointModel, DecoderForCausalLM
from atom_core.runtime import Runtime


class DraftInputs(nn.Module):
    """What the draft layers share: the model's embedding, and the rope table."""

    def __init__(self, config: ModelConfig, runtime: Runtime) -> None:
        super().__init__()
        self.embed_tokens: nn.Module = MissingLayer()
        self.rotary = RotaryTable(config.rope, runtime)


class DraftModel(CheckpointModel, ABC):
    """The draft layers of one checkpoint. A subclass has their modules, under their names in checkpoints.

    Args:
        config: of the draft layers alone, as :meth:`from_hf` reads it.
        runtime: the draft's own.
        prefix: what module names start with, before the checkpoint's names.
    """

    borrowed = ("model.embed_tokens", "lm_head")
    #: The key of a configuration that counts the draft layers.
    count_key: ClassVar[str] = "num_nextn_predict_layers"
    model: DraftInputs

    def __init__(self, config: ModelConfig, runtime: Runtime, prefix: str = "") -> None:
        super().__init__()
        self.config = config
        self.runtime = replace(runtime, quant=runtime.quant.below(prefix))
        self.lm_head: nn.Module = MissingLayer()

    @property
    @abstractmethod
    def layers(self) -> Sequence[DecoderLayer]:
        """The draft layers, the first one first."""

    @property
    @abstractmethod
    def own_prefix(self) -> str:
        """What the names of a draft layer's tensors begin with."""

    @abstractmethod
    def draft(
        self, embedded: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor, step: object, index: int
    ) -> torch.Tensor:
        """Hidden states ``[T, hidden]`` by layer ``index``; ``embedded`` and ``hidden`` have that shape and stay."""

    @classmethod
    @abstractmethod
    def family(cls) -> type[DecoderForCausalLM]:
        """The class of the model that these layers draft for."""

    @classmethod
    @abstractmethod
    def of_layers(cls, hf: Any) -> ModelConfig:
        """The configuration of the draft layers alone, none of them if the checkpoint has none.

        Args:
            hf: an object of the family's schema.
        """

    @classmethod
    def from_hf(cls, source: Mapping[str, Any] | Any) -> ModelConfig:
        """The configuration of the draft layers.

        Args:
            source: the whole checkpoint's configuration, as for :func:`atom_core.models.read_config.read_model_config`.

        Raises:
            ValueError: it has no draft layers, or a value that the family cannot run.
        """
        hf: HfConfig = cls.family().schema.read(as_mapping(source))
        config = cls.of_layers(hf)
        if not config.layers:
            raise ValueError(
                f"The checkpoint has no layers to draft with (multi-token prediction): {cls.count_key}="
                f"{getattr(hf, cls.count_key)!r} in config.json. Leave speculative decoding by them out."
            )
        return config

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
        return self.draft(self.model.embed_tokens(input_ids), hidden, positions, step, depth % self.config.num_layers)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """``hidden [T, hidden]`` to ``[T, vocabulary]``."""
        return cast(torch.Tensor, self.lm_head(hidden))
