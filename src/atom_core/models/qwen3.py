"""Qwen3: a norm over each head of q and k before rope, and a head size of its own (128 where the config gives none)."""

from __future__ import annotations

from atom_core.config import HfConfig, ModelConfig, read_decoder, window_pattern
from atom_core.models.decoder import DecoderForCausalLM


class Qwen3ForCausalLM(DecoderForCausalLM):
    """See the module's text."""

    @classmethod
    def read_config(cls, hf: HfConfig) -> ModelConfig:
        """See :meth:`DecoderForCausalLM.read_config`."""
        bias = hf.get("attention_bias", False)
        return read_decoder(
            hf,
            qkv_bias=bias,
            attention_out_bias=bias,
            qk_norm=True,
            windows=window_pattern(hf),
            default_head_dim=128,
        )
