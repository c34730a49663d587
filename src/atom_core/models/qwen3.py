"""Qwen3 (arXiv 2505.09388): grouped-query attention and a SwiGLU feed-forward.

Each head of q and k has an RMS norm before rope. The head size is a setting of its own (default 128).
"""

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
