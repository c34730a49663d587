"""Llama 2 (arXiv 2307.09288) and Llama 3.x (arXiv 2407.21783): grouped-query attention and a SwiGLU feed-forward.

Biases are optional. Small models tie the head to the embedding; Llama 3.1 and later scale rope ("llama3").
"""

from __future__ import annotations

from typing import ClassVar

from atom_core.config import ModelConfig, read_attention, read_decoder
from atom_core.hf_config import HfConfig
from atom_core.models.decoder import DecoderForCausalLM


class LlamaKeys(HfConfig):
    """``attention_bias`` applies to all four projections, ``mlp_bias`` to all three."""

    model_types: ClassVar[tuple[str, ...]] = ("llama",)

    attention_bias: bool = False
    mlp_bias: bool = False


class LlamaForCausalLM(DecoderForCausalLM):
    """See the module's text."""

    schema = LlamaKeys

    @classmethod
    def read_config(cls, hf: LlamaKeys) -> ModelConfig:
        """See :meth:`DecoderForCausalLM.read_config`."""
        bias = hf.attention_bias
        attention = read_attention(hf, qkv_bias=bias, out_bias=bias)
        return read_decoder(hf, [attention] * hf.num_hidden_layers, mlp_bias=hf.mlp_bias)
