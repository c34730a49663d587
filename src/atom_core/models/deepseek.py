"""DeepSeek V2, V2-Lite, V3 and R1, and Kimi K2: attention over latents, mixtures of experts behind some dense layers.

V2 (arXiv 2405.04434) scores experts by a softmax, V3 (arXiv 2412.19437) by sigmoids, with a correction that keeps
experts busy alike. The layers that checkpoints have behind the last, to draft further tokens with, are left out.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from atom_core.config import (
    GroupScore,
    HfConfig,
    LatentConfig,
    ModelConfig,
    MoEConfig,
    RoutingConfig,
    Scoring,
    read_decoder,
    read_experts,
    read_groups,
)
from atom_core.models.decoder import DecoderForCausalLM
from atom_core.rope import read_score_factor

#: By ``topk_method``: whether experts are in groups, what a group's score is, and whether scores are corrected.
_METHODS: dict[str, tuple[bool, GroupScore, bool]] = {
    "greedy": (False, "largest", False),
    "group_limited_greedy": (True, "largest", False),
    "noaux_tc": (True, "two largest", True),
}
_SCORINGS: dict[str, Scoring] = {"softmax": "softmax", "sigmoid": "sigmoid"}


class DeepseekV2ForCausalLM(DecoderForCausalLM):
    """See the module's text."""

    #: What missing keys mean.
    defaults: ClassVar[dict[str, object]] = {
        "topk_method": "greedy",
        "scoring_func": "softmax",
        "norm_topk_prob": False,
        "first_k_dense_replace": 0,
        "n_shared_experts": 2,
    }

    @classmethod
    def read_config(cls, hf: HfConfig) -> ModelConfig:
        """See :meth:`DecoderForCausalLM.read_config`."""
        hf = hf.with_defaults(**cls.defaults)
        for key in ("attention_bias", "mlp_bias"):
            if hf.get(key, False):
                raise ValueError(f"{key}=true is not supported for {hf.architecture()}; supported: false.")
        rope_dim = hf.positive("qk_rope_head_dim", 64)
        # Whatever a config calls head_dim, what is rotated is all of a key's rotated part.
        config = read_decoder(
            HfConfig({**hf.values, "head_dim": rope_dim, "num_key_value_heads": hf.positive("num_attention_heads")}),
            mixtures=_mixtures(hf),
            draft_layers=hf.get("num_nextn_predict_layers", 0),
        )
        latent = _latent(hf, rope_dim)
        rope = replace(config.rope, interleaved=hf.get("rope_interleave", True))
        return replace(config, head_dim=latent.query_dim, rope=rope, latent=latent)


class DeepseekV3ForCausalLM(DeepseekV2ForCausalLM):
    """V3, R1 and Kimi K2."""

    defaults: ClassVar[dict[str, object]] = {
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "first_k_dense_replace": 3,
        "n_shared_experts": 1,
        "n_group": 8,
        "topk_group": 4,
        "num_nextn_predict_layers": 1,
    }


def _latent(hf: HfConfig, rope_dim: int) -> LatentConfig:
    nope_dim = hf.positive("qk_nope_head_dim", 128)
    compressed = hf.values.get("q_lora_rank", 1536) is not None
    return LatentConfig(
        query_rank=hf.positive("q_lora_rank", 1536) if compressed else None,
        rank=hf.positive("kv_lora_rank", 512),
        nope_dim=nope_dim,
        rope_dim=rope_dim,
        value_dim=hf.positive("v_head_dim", 128),
        scale=(nope_dim + rope_dim) ** -0.5 * read_score_factor(hf.values),
    )


def _mixtures(hf: HfConfig) -> list[MoEConfig | None]:
    num_experts, top_k = read_experts(hf, ("n_routed_experts",), 64, 6)
    method, scoring = hf.get("topk_method", ""), hf.get("scoring_func", "")
    for key, value, supported in (("topk_method", method, _METHODS), ("scoring_func", scoring, _SCORINGS)):
        if value not in supported:
            raise ValueError(f"{key}={value!r} is not supported; supported: {', '.join(map(repr, supported))}.")
    if method != "noaux_tc" and hf.get("norm_topk_prob", False):
        # DeepSeek's own code then leaves the scale out, vLLM's does both, and Hugging Face's neither.
        raise ValueError(f"norm_topk_prob=true with topk_method={method!r} is not supported; supported: false.")
    in_groups, group_score, correction = _METHODS[method]
    num_groups, top_groups = read_groups(hf, num_experts, top_k) if in_groups else (1, 1)
    routing = RoutingConfig(
        num_experts,
        top_k,
        _SCORINGS[scoring],
        renormalize=hf.get("norm_topk_prob", False),
        correction=correction,
        scale=float(hf.get("routed_scaling_factor", 1.0)),
        num_groups=num_groups,
        top_groups=top_groups,
        group_score=group_score,
    )
    size, shared = hf.positive("moe_intermediate_size", 1407), hf.get("n_shared_experts", 0)
    moe = MoEConfig(routing, size, shared_size=size * shared, float32_scores=True)
    dense, every = hf.get("first_k_dense_replace", 0), hf.positive("moe_layer_freq", 1)
    return [None if index < dense or index % every else moe for index in range(hf.positive("num_hidden_layers"))]
