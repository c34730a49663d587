"""Mistral: Llama without biases, and with one sliding window for all layers, or none."""

from __future__ import annotations

from atom_core.config import HfConfig, ModelConfig, read_decoder
from atom_core.models.decoder import DecoderForCausalLM


class MistralForCausalLM(DecoderForCausalLM):
    """See the module's text."""

    @classmethod
    def read_config(cls, hf: HfConfig) -> ModelConfig:
        """See :meth:`DecoderForCausalLM.read_config`."""
        return read_decoder(hf, windows=[hf.window()] * hf.positive("num_hidden_layers"))
