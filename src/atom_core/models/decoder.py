"""The pre-norm decoder that all families share; families differ only in configuration.

A batch is ``T`` tokens in one row without padding between requests. Layers run fused (:mod:`atom_core.fusion`), or one
module after the other.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
from torch import nn

from atom_core.config import ModelConfig
from atom_core.decoder_layer import DecoderLayer
from atom_core.fusion.layers import FusedLayers
from atom_core.hf_config import HfConfig
from atom_core.layers.embedding import LMHead, TokenEmbedding
from atom_core.layers.norm import RMSNorm
from atom_core.layers.parameters import MissingLayer
from atom_core.layers.rotary import RotaryTable
from atom_core.runtime import Runtime


@dataclass(frozen=True)
class Carried:
    """What one pipeline stage sends to the next: two terms of the residual stream, each ``[T, hidden]``."""

    hidden: torch.Tensor
    residual: torch.Tensor


class Decoder(nn.Module):
    """This rank's pipeline stage of the embedding, the layers and the final norm."""

    def __init__(self, config: ModelConfig, runtime: Runtime, name: str) -> None:
        super().__init__()
        stage, count = runtime.pipeline, config.num_layers
        self.is_first, self.is_last = stage.is_first(), stage.is_last(count)
        # A tied head reads the embedding's table, so the last stage needs it too.
        needs_table = self.is_first or (self.is_last and config.tie_word_embeddings)
        self.embed_tokens = (
            TokenEmbedding(config.vocab_size, config.hidden_size, runtime) if needs_table else MissingLayer()
        )
        self.rotary = RotaryTable(config.rope, runtime)
        self.stage = stage.layers(count)
        self.layers = nn.ModuleList(
            DecoderLayer(config, index, self.rotary, runtime, f"{name}.layers.{index}")
            if index in self.stage
            else MissingLayer()
            for index in range(count)
        )
        norm = partial(RMSNorm, config.hidden_size, config.rms_norm_eps, runtime, config.zero_centered_norms)
        self.norm = norm() if self.is_last else MissingLayer()
        layers, last_norm = [cast(DecoderLayer, self.layers[index]) for index in self.stage], self.norm
        #: Runs instead of the layers and the norm. None: each module runs by itself.
        self.fused = (
            FusedLayers(layers, last_norm if isinstance(last_norm, RMSNorm) else None, runtime)
            if runtime.fuse_modules
            else None
        )

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        step: object,
        inputs_embeds: torch.Tensor | None = None,
        carried: Carried | None = None,
    ) -> torch.Tensor | Carried:
        """See :meth:`DecoderForCausalLM.forward`."""
        x, residual = (
            (carried.hidden, carried.residual)
            if carried is not None
            # Layers write to the stream in place; the given embeddings belong to the caller.
            else (self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds.clone(), None)
        )
        if self.fused is not None and not self.fused.has_hooks:
            x, residual = self.fused(x, residual, positions, step)
        else:
            for index in self.stage:
                x, residual = self.layers[index](x, residual, positions, step)
            if self.is_last:
                x, residual = self.norm(x, residual)
        return x if self.is_last else Carried(x, cast(torch.Tensor, residual))


class CheckpointModel(nn.Module):
    """A model that is loaded from a checkpoint, or from some of its tensors."""

    config: ModelConfig
    #: Names of rope tables in old checkpoints, which are not loaded.
    ignored_suffixes: tuple[str, ...] = ("rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached")
    #: Names of checkpoint tensors that are not part of the model.
    ignored_prefixes: tuple[str, ...] = ()
    #: Modules of another model, which loads them.
    borrowed: tuple[str, ...] = ()
    #: Indices of the checkpoint's layers after the model's last; set when the checkpoint is inspected.
    unread: range = range(0)


class DecoderForCausalLM(CheckpointModel, ABC):
    """A language model. Logits are a call of their own, because engines need them for few rows only."""

    def __init__(self, config: ModelConfig, runtime: Runtime, prefix: str = "") -> None:
        super().__init__()
        self.config = config
        runtime = replace(runtime, quant=runtime.quant.below(prefix))
        self.model = Decoder(config, runtime, f"{prefix}.model" if prefix else "model")
        if self.model.is_last:
            tied_to = self.model.embed_tokens if config.tie_word_embeddings else None
            assert tied_to is None or isinstance(tied_to, TokenEmbedding)
            self.lm_head: nn.Module = LMHead(config.vocab_size, config.hidden_size, runtime, tied_to)
        else:
            self.lm_head = MissingLayer()
        unread = () if self.draft_prefix is None else (self.draft_prefix,)
        drafts = range(config.num_layers, config.num_layers + config.draft_layers)
        self.ignored_prefixes = (
            *(("lm_head.",) if config.tie_word_embeddings else ()),
            *(f"model.layers.{index}." for index in drafts),
            *unread,
            *self.vision_prefixes,
        )

    #: What names of draft layers begin with that are not numbered after the last layer.
    draft_prefix: str | None = None
    #: What names of a vision part begin with, as Transformers and as vLLM write them.
    vision_prefixes: tuple[str, ...] = ()
    #: The keys of a Hugging Face configuration that the family reads.
    schema: type[HfConfig]

    @classmethod
    @abstractmethod
    def read_config(cls, hf: Any) -> ModelConfig:
        """Convert a configuration, an object of :attr:`schema`.

        Raises:
            ValueError: a value that the family cannot run.
        """

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        step: object = None,
        inputs_embeds: torch.Tensor | None = None,
        carried: Carried | None = None,
    ) -> torch.Tensor | Carried:
        """One step over a batch.

        Args:
            input_ids: ``[T]``; None where ``inputs_embeds`` or ``carried`` is given.
            positions: ``[T]``.
            step: passed to the attention layers unchanged.
            inputs_embeds: ``[T, hidden]``, instead of ``input_ids``.
            carried: what the previous pipeline stage returned.

        Returns:
            Hidden states ``[T, hidden]`` after the final norm; on stages before the last, :class:`Carried`.
        """
        result: torch.Tensor | Carried = self.model(input_ids, positions, step, inputs_embeds, carried)
        return result

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        """``input_ids [T]`` to ``[T, hidden]``."""
        embedded: torch.Tensor = self.model.embed_tokens(input_ids)
        return embedded

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """``hidden [T, hidden]`` to ``[T, vocabulary]``."""
        result: torch.Tensor = self.lm_head(hidden)
        return result
