"""The pre-norm decoder that the families share: they differ in configuration alone.

``T`` tokens of a batch in one row, no padding between requests. Adding to the residual stream is one kernel with the
product in front or with the norm behind; see :class:`atom_core.layers.norm.Stream`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from atom_core.config import ModelConfig
from atom_core.hf_config import HfConfig
from atom_core.layers.attention import Attention
from atom_core.layers.embedding import LMHead, TokenEmbedding
from atom_core.layers.mla import LatentAttention
from atom_core.layers.mlp import GatedMLP
from atom_core.layers.moe import MoE
from atom_core.layers.norm import RMSNorm, Stream
from atom_core.layers.parameters import MissingLayer
from atom_core.layers.rotary import RotaryTable
from atom_core.runtime import Runtime


@dataclass(frozen=True)
class Carried:
    """What one pipeline stage hands to the next: two parts of the residual stream, both ``[T, hidden]``."""

    hidden: torch.Tensor
    residual: torch.Tensor


class DecoderLayer(nn.Module):
    """Attention, then the feed-forward network, each behind its norm."""

    def __init__(self, config: ModelConfig, index: int, rotary: RotaryTable, runtime: Runtime, name: str) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, runtime)
        before, attn_name = self.input_layernorm, f"{name}.self_attn"
        self.self_attn = (
            Attention(config, config.layers[index], index, before, rotary, runtime, attn_name)
            if config.latent is None
            else LatentAttention(config, index, before, rotary, runtime, attn_name)
        )
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, runtime)
        moe, norm = config.layers[index].moe, self.post_attention_layernorm
        #: What checkpoints call the feed-forward network.
        self.feed_forward_name = "mlp" if moe is None else moe.names.module
        module_name = f"{name}.{self.feed_forward_name}"
        self.add_module(
            self.feed_forward_name,
            GatedMLP(config, norm, runtime, module_name)
            if moe is None
            else MoE(moe, config.hidden_size, config.activation, norm, runtime, module_name, index),
        )

    def forward(self, stream: Stream, positions: torch.Tensor, step: object) -> Stream:
        """The stream behind this layer."""
        result: Stream = self.feed_forward(self.self_attn(stream, positions, step))
        return result

    @property
    def feed_forward(self) -> nn.Module:
        """The network behind attention."""
        module: nn.Module = getattr(self, self.feed_forward_name)
        return module


class Decoder(nn.Module):
    """Embedding, layers and final norm: this rank's pipeline stage of them."""

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
        mine = stage.layers(count)
        self.layers = nn.ModuleList(
            DecoderLayer(config, index, self.rotary, runtime, f"{name}.layers.{index}")
            if index in mine
            else MissingLayer()
            for index in range(count)
        )
        self.stage, self.group = mine, runtime.tensor_parallel
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, runtime) if self.is_last else MissingLayer()

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        step: object,
        inputs_embeds: torch.Tensor | None = None,
        carried: Carried | None = None,
    ) -> torch.Tensor | Carried:
        """See :meth:`DecoderForCausalLM.forward`."""
        if carried is not None:
            stream = Stream(carried.hidden, carried.residual)
        else:
            # The stream is written to in place; given embeddings belong to the caller.
            stream = Stream(None, self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds.clone())
        for index in self.stage:
            stream = self.layers[index](stream, positions, step)
        if not self.is_last:
            last, residual = stream.whole(self.group)
            return Carried(torch.zeros_like(residual) if last is None else last, residual)
        normed: torch.Tensor = self.norm(stream)[0]
        return normed


class CheckpointModel(nn.Module):
    """What is loaded from a checkpoint, of which it need not be all."""

    config: ModelConfig
    #: Checkpoint names that hold nothing to load: tables that old checkpoints stored.
    ignored_suffixes: tuple[str, ...] = ("rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached")
    #: Checkpoint names of what is no part of the model.
    ignored_prefixes: tuple[str, ...] = ()
    #: Modules that are another model's, which loads them.
    borrowed: tuple[str, ...] = ()
    #: Indices of layers that the checkpoint has behind the model's, which is known once it has been looked at.
    unread: range = range(0)


class DecoderForCausalLM(CheckpointModel, ABC):
    """A language model: hidden states and logits apart, because engines want logits of few rows."""

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
        behind = range(config.num_layers, config.num_layers + config.draft_layers)
        self.ignored_prefixes = (
            *(("lm_head.",) if config.tie_word_embeddings else ()),
            *(f"model.layers.{index}." for index in behind),
        )

    #: What the family reads of a Hugging Face configuration.
    schema: type[HfConfig]

    @classmethod
    @abstractmethod
    def read_config(cls, hf: Any) -> ModelConfig:
        """The family's reading of a configuration, an object of :attr:`schema`.

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
            step: handed to the attention layers as it is.
            inputs_embeds: ``[T, hidden]``, instead of ids.
            carried: what the stage before this one returned.

        Returns:
            Hidden states ``[T, hidden]`` after the final norm; before the last stage, what it carries on.
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
