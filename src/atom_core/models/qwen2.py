"""Qwen2 and Qwen2.5: biases on q, k and v alone; an optional window from some layer on."""

from __future__ import annotations

from atom_core.config import HfConfig, ModelConfig, read_decoder, window_pattern
from atom_core.models.decoder import DecoderForCausalLM


class Qwen2ForCausalLM(DecoderForCausalLM):
    """See the module's text."""

    @classmethod
    def read_config(cls, hf: HfConfig) -> ModelConfig:
        """See :meth:`DecoderForCausalLM.read_config`."""
        return read_decoder(hf, qkv_bias=True, windows=window_pattern(hf))
