"""Llama 2 and 3.x: grouped-query attention, optional biases, llama3 rope scaling, tied heads in the small ones."""

from __future__ import annotations

from atom_core.config import HfConfig, ModelConfig, read_decoder
from atom_core.models.decoder import DecoderForCausalLM


class LlamaForCausalLM(DecoderForCausalLM):
    """``attention_bias`` is one switch for all four projections, ``mlp_bias`` for all three."""

    @classmethod
    def read_config(cls, hf: HfConfig) -> ModelConfig:
        """See :meth:`DecoderForCausalLM.read_config`."""
        bias = hf.get("attention_bias", False)
        return read_decoder(hf, qkv_bias=bias, attention_out_bias=bias, mlp_bias=hf.get("mlp_bias", False))
