"""Qwen3: a norm over each head of q and k before rope, and a head size of its own (128 where the config gives none)."""

from __future__ import annotations

from typing import ClassVar

from atom_core.config import ModelConfig, read_attention, read_decoder, windowed
from atom_core.hf_config import Size
from atom_core.models.decoder import DecoderForCausalLM
from atom_core.models.qwen2 import QwenKeys


class Qwen3Keys(QwenKeys):
    """See the module's text."""

    model_types: ClassVar[tuple[str, ...]] = ("qwen3",)
    fixed: ClassVar[dict[str, tuple[object, ...]]] = {"use_qk_norm": (True,)}

    head_dim: Size | None = 128
    attention_bias: bool = False


class Qwen3ForCausalLM(DecoderForCausalLM):
    """See the module's text."""

    schema = Qwen3Keys

    @classmethod
    def read_config(cls, hf: Qwen3Keys) -> ModelConfig:
        """See :meth:`DecoderForCausalLM.read_config`."""
        bias = hf.attention_bias
        attention = read_attention(hf, qkv_bias=bias, out_bias=bias, qk_norm=True)
        return read_decoder(hf, windowed(attention, hf.windows()))
