"""Qwen3-MoE (arXiv 2505.09388): Qwen3's attention, and a mixture of SwiGLU experts in all layers or in some.

A softmax router chooses the experts; the other layers have a dense feed-forward.
"""

from __future__ import annotations

from typing import ClassVar

from atom_core.config import (
    ModelConfig,
    MoEConfig,
    check_experts,
    every_window_or_none,
    read_attention,
    read_decoder,
    windowed,
)
from atom_core.hf_config import Experts, HfConfig, Index, Size, Tokens
from atom_core.models.decoder import DecoderForCausalLM
from atom_core.types import RoutingConfig


class Qwen3MoeKeys(HfConfig):
    """``use_sliding_window`` applies to all layers."""

    model_types: ClassVar[tuple[str, ...]] = ("qwen3_moe",)
    fixed: ClassVar[dict[str, tuple[object, ...]]] = {"use_qk_norm": (True,), "scoring_func": ("softmax",)}

    num_key_value_heads: int | None = 4
    attention_bias: bool = False
    use_sliding_window: bool = False
    sliding_window: Tokens | None = 4096
    layer_types: list[str] | None = None
    max_window_layers: Index | None = None
    """Many tools write it; Transformers' class of this family ignores it."""
    num_experts: Experts | None = None
    num_local_experts: Experts | None = None
    """The name of ``num_experts`` in Transformers 5."""
    num_experts_per_tok: Experts = 8
    moe_intermediate_size: Size = 768
    norm_topk_prob: bool = False
    decoder_sparse_step: Size = 1
    mlp_only_layers: list[Index] | None = None


class Qwen3MoeForCausalLM(DecoderForCausalLM):
    """See the module's text."""

    schema = Qwen3MoeKeys

    @classmethod
    def read_config(cls, hf: Qwen3MoeKeys) -> ModelConfig:
        """See :meth:`DecoderForCausalLM.read_config`."""
        bias, window = hf.attention_bias, hf.sliding_window if hf.use_sliding_window else None
        attention = read_attention(hf, qkv_bias=bias, out_bias=bias, qk_norm=True)
        windows = every_window_or_none(hf.layer_types, window, hf.num_hidden_layers)
        return read_decoder(hf, windowed(attention, windows), mixtures=_mixtures(hf))


def _mixtures(hf: Qwen3MoeKeys) -> list[MoEConfig | None]:
    if None not in (hf.num_experts, hf.num_local_experts) and hf.num_experts != hf.num_local_experts:
        raise ValueError(
            f"The model's config has num_experts={hf.num_experts} and num_local_experts={hf.num_local_experts}, two "
            "names of one count; supported: one of them, or the same in both."
        )
    num_experts = hf.num_experts or hf.num_local_experts or 128
    check_experts(num_experts, hf.num_experts_per_tok, "num_experts")
    moe = MoEConfig(
        RoutingConfig(num_experts, hf.num_experts_per_tok, "softmax", renormalize=hf.norm_topk_prob),
        hf.moe_intermediate_size,
    )
    every, dense = hf.decoder_sparse_step, hf.mlp_only_layers or ()
    return [None if index in dense or (index + 1) % every else moe for index in range(hf.num_hidden_layers)]
