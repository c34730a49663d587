"""Qwen3-MoE: Qwen3 with a mixture of experts in place of the feed-forward network, in all layers or in some."""

from __future__ import annotations

from atom_core.config import HfConfig, ModelConfig, MoEConfig, RoutingConfig, read_decoder, read_experts, window_pattern
from atom_core.models.decoder import DecoderForCausalLM


class Qwen3MoeForCausalLM(DecoderForCausalLM):
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
            mixtures=_mixtures(hf),
        )


def _mixtures(hf: HfConfig) -> list[MoEConfig | None]:
    # Configurations of transformers 5 call them num_local_experts.
    num_experts, top_k = read_experts(hf, ("num_experts", "num_local_experts"), 128, 8)
    moe = MoEConfig(
        RoutingConfig(num_experts, top_k, "softmax", renormalize=hf.get("norm_topk_prob", False)),
        hf.positive("moe_intermediate_size", 768),
    )
    every = hf.positive("decoder_sparse_step", 1)
    dense: list[int] = hf.get("mlp_only_layers", [])
    return [None if index in dense or (index + 1) % every else moe for index in range(hf.positive("num_hidden_layers"))]
