"""Mistral (arXiv 2310.06825): grouped-query attention and a SwiGLU feed-forward, as Llama without biases.

All layers have the same sliding window, or none.
"""

from __future__ import annotations

from typing import ClassVar

from atom_core.config import ModelConfig, every_window_or_none, read_attention, read_decoder, windowed
from atom_core.hf_config import HfConfig, Tokens
from atom_core.models.decoder import DecoderForCausalLM


class MistralKeys(HfConfig):
    """Transformers' class for ``layer_types`` is Ministral's."""

    model_types: ClassVar[tuple[str, ...]] = ("mistral",)

    num_key_value_heads: int | None = 8
    sliding_window: Tokens | None = 4096
    layer_types: list[str] | None = None


class MistralForCausalLM(DecoderForCausalLM):
    """See the module's text."""

    schema = MistralKeys

    @classmethod
    def read_config(cls, hf: MistralKeys) -> ModelConfig:
        """See :meth:`DecoderForCausalLM.read_config`."""
        windows = every_window_or_none(hf.layer_types, hf.sliding_window, hf.num_hidden_layers)
        return read_decoder(hf, windowed(read_attention(hf), windows))
