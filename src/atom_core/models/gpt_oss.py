"""GPT-OSS (arXiv 2508.10925): attention with sinks, every other layer's in a window; experts with biases."""

from __future__ import annotations

from atom_core.config import (
    SWIGLU_LIMIT,
    SWIGLU_STEEPNESS,
    ExpertNames,
    HfConfig,
    ModelConfig,
    MoEConfig,
    RoutingConfig,
    read_decoder,
    read_experts,
    typed_windows,
)
from atom_core.models.decoder import DecoderForCausalLM

#: What a configuration without a rope means.
_ROPE = {"rope_type": "yarn", "factor": 32.0, "truncate": False, "original_max_position_embeddings": 4096}


class GptOssForCausalLM(DecoderForCausalLM):
    """See the module's text."""

    @classmethod
    def read_config(cls, hf: HfConfig) -> ModelConfig:
        """See :meth:`DecoderForCausalLM.read_config`."""
        hf = hf.with_defaults(rope_theta=150000.0, rms_norm_eps=1e-5, sliding_window=128, attention_bias=True)
        if not (hf.get("rope_parameters", {}) or hf.get("rope_scaling", {})):
            hf = HfConfig({**hf.values, "rope_scaling": _ROPE})
        for key, value in (("swiglu_alpha", SWIGLU_STEEPNESS), ("swiglu_limit", SWIGLU_LIMIT)):
            if hf.get(key, value) != value:
                raise ValueError(f"{key}={hf.get(key, value)!r} is not supported; supported: {value}.")
        bias, num_layers = hf.get("attention_bias", True), hf.positive("num_hidden_layers")
        num_experts, top_k = read_experts(hf, ("num_local_experts",), 128, 4)
        # The chosen experts' share of the softmax over all of them, which is the softmax over the chosen ones.
        routing = RoutingConfig(num_experts, top_k, "softmax", renormalize=True)
        names = ExpertNames(router="router", gate="gate_up_proj", up="gate_up_proj", down="down_proj")
        moe = MoEConfig(routing, hf.positive("intermediate_size"), names, bias=True, fused=True)
        return read_decoder(
            hf,
            qkv_bias=bias,
            attention_out_bias=bias,
            sinks=True,
            activation="clamped_swiglu",
            windows=_windows(hf, num_layers),
            mixtures=[moe] * num_layers,
            default_head_dim=64,
        )


def _windows(hf: HfConfig, num_layers: int) -> list[int | None]:
    alternating = [("sliding_attention", "full_attention")[index % 2] for index in range(num_layers)]
    types, window = hf.get("layer_types", alternating), hf.window()
    if window is None and "sliding_attention" in types:
        raise ValueError("sliding_window is null, but layer_types names layers of sliding_attention; give it a size.")
    return typed_windows(types, window, num_layers)
