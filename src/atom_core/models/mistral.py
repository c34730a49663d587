"""Mistral: Llama without biases; where the config gives a window, every layer has it."""

from __future__ import annotations

from atom_core.config import HfConfig, ModelConfig, read_decoder
from atom_core.models.decoder import DecoderForCausalLM


class MistralForCausalLM(DecoderForCausalLM):
    """See the module's text."""

    @classmethod
    def read_config(cls, hf: HfConfig) -> ModelConfig:
        """See :meth:`DecoderForCausalLM.read_config`."""
        window: int | None = hf.get("sliding_window", None)
        return read_decoder(hf, windows=[window] * hf.positive("num_hidden_layers"))
