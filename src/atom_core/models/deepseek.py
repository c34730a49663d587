"""DeepSeek V2, V2-Lite, V3 and R1, and Kimi K2: multi-head latent attention (MLA) and SwiGLU experts.

The first layers are dense. V2 (arXiv 2405.04434) scores experts by a softmax; V3 (arXiv 2412.19437) by sigmoids, with
a correction that balances the experts' load. This model does not load the checkpoint's draft layers.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from atom_core.config import MlaConfig, ModelConfig, MoEConfig, check_experts, check_groups, read_decoder
from atom_core.hf_config import DraftLayers, Experts, HfConfig, Index, Number, Size
from atom_core.models.decoder import DecoderForCausalLM
from atom_core.rope import read_rope, read_score_factor
from atom_core.types import GroupScore, RoutingConfig, Scoring

#: By ``topk_method``: whether experts are in groups, what a group's score is, and whether scores are corrected.
_METHODS: dict[str, tuple[bool, GroupScore, bool]] = {
    "greedy": (False, "largest", False),
    "group_limited_greedy": (True, "largest", False),
    "noaux_tc": (True, "two largest", True),
}


class DeepseekKeys(HfConfig):
    """What V2 and V3 share. ``head_dim`` is not used: its meaning differs between configurations."""

    fixed: ClassVar[dict[str, tuple[object, ...]]] = {"attention_bias": (False,), "mlp_bias": (False,)}

    kv_lora_rank: Size = 512
    q_lora_rank: Size | None = 1536
    qk_nope_head_dim: Size = 128
    qk_rope_head_dim: Size = 64
    v_head_dim: Size = 128
    n_routed_experts: Experts
    num_experts_per_tok: Experts | None
    n_shared_experts: Index | None
    n_group: Experts | None = None
    topk_group: Experts | None = None
    topk_method: str
    scoring_func: str
    moe_intermediate_size: Size
    moe_layer_freq: Size = 1
    first_k_dense_replace: Index
    norm_topk_prob: bool
    routed_scaling_factor: Number
    num_nextn_predict_layers: DraftLayers = 0

    #: How this version scores experts; Transformers' class supports no other scoring.
    scoring: ClassVar[Scoring]


class DeepseekV2Keys(DeepseekKeys):
    """V2, V2-Lite and Coder-V2: experts scored by a softmax."""

    model_types: ClassVar[tuple[str, ...]] = ("deepseek_v2",)
    fixed: ClassVar[dict[str, tuple[object, ...]]] = {**DeepseekKeys.fixed, "rope_interleave": (True,)}
    scoring: ClassVar[Scoring] = "softmax"

    n_routed_experts: Experts = 64
    num_experts_per_tok: Experts | None = None
    n_shared_experts: Index | None = 2
    topk_method: str = "greedy"
    scoring_func: str = "softmax"
    moe_intermediate_size: Size = 1407
    first_k_dense_replace: Index = 0
    norm_topk_prob: bool = False
    routed_scaling_factor: Number = 1.0


class DeepseekV3Keys(DeepseekKeys):
    """V3, R1, Kimi K2 and Moonlight: experts scored by sigmoids, with a correction."""

    model_types: ClassVar[tuple[str, ...]] = ("deepseek_v3", "kimi_k2")
    scoring: ClassVar[Scoring] = "sigmoid"

    n_routed_experts: Experts = 256
    num_experts_per_tok: Experts | None = 8
    n_shared_experts: Index | None = 1
    n_group: Experts | None = 8
    topk_group: Experts | None = 4
    topk_method: str = "noaux_tc"
    scoring_func: str = "sigmoid"
    moe_intermediate_size: Size = 2048
    first_k_dense_replace: Index = 3
    norm_topk_prob: bool = True
    routed_scaling_factor: Number = 2.5
    num_nextn_predict_layers: DraftLayers = 1
    rope_interleave: bool = True


class DeepseekV2ForCausalLM(DecoderForCausalLM):
    """See the module's text."""

    schema: type[DeepseekKeys] = DeepseekV2Keys

    @classmethod
    def read_config(cls, hf: DeepseekKeys) -> ModelConfig:
        """See :meth:`DecoderForCausalLM.read_config`."""
        rope = read_rope(hf, head_dim=hf.qk_rope_head_dim, size_key="qk_rope_head_dim")
        rope = replace(rope, interleaved=getattr(hf, "rope_interleave", True))
        mixers, drafts = [_mla(hf)] * hf.num_hidden_layers, hf.num_nextn_predict_layers
        return read_decoder(hf, mixers, mixtures=_mixtures(hf), draft_layers=drafts, rope=rope)


class DeepseekV3ForCausalLM(DeepseekV2ForCausalLM):
    """V3, R1 and Kimi K2."""

    schema = DeepseekV3Keys


def _mla(hf: DeepseekKeys) -> MlaConfig:
    return MlaConfig(
        num_heads=hf.num_attention_heads,
        query_rank=hf.q_lora_rank,
        rank=hf.kv_lora_rank,
        nope_dim=hf.qk_nope_head_dim,
        rope_dim=hf.qk_rope_head_dim,
        value_dim=hf.v_head_dim,
        scale=(hf.qk_nope_head_dim + hf.qk_rope_head_dim) ** -0.5 * read_score_factor(hf.rope_keys),
    )


def _mixtures(hf: DeepseekKeys) -> list[MoEConfig | None]:
    dense, every = hf.first_k_dense_replace, hf.moe_layer_freq
    places = [index >= dense and index % every == 0 for index in range(hf.num_hidden_layers)]
    if not any(places):
        return [None] * len(places)
    num_experts, top_k = hf.n_routed_experts, hf.num_experts_per_tok
    if top_k is None:
        raise ValueError("The model's config has no 'num_experts_per_tok', which its mixtures of experts need.")
    check_experts(num_experts, top_k, "n_routed_experts")
    method = hf.topk_method
    if method not in _METHODS:
        raise ValueError(f"topk_method={method!r} is not supported; supported: {', '.join(map(repr, _METHODS))}.")
    if hf.scoring_func != hf.scoring:
        raise ValueError(
            f"scoring_func={hf.scoring_func!r} is not supported for {hf.architecture}, which scores experts by "
            f"{hf.scoring!r}; supported: {hf.scoring!r}."
        )
    in_groups, group_score, correction = _METHODS[method]
    if correction != (hf.scoring == "sigmoid"):
        raise ValueError(
            f"topk_method={method!r} is not supported for {hf.architecture}; supported: "
            f"{', '.join(repr(name) for name, it in _METHODS.items() if it[2] == (hf.scoring == 'sigmoid'))}."
        )
    if method != "noaux_tc" and hf.norm_topk_prob:
        # Implementations disagree: DeepSeek omits the scale, vLLM does both, Hugging Face does neither.
        raise ValueError(f"norm_topk_prob=true with topk_method={method!r} is not supported; supported: false.")
    num_groups, top_groups = (hf.n_group or 1, hf.topk_group or 1) if in_groups else (1, 1)
    check_groups(num_groups, top_groups, num_experts, top_k)
    routing = RoutingConfig(
        num_experts,
        top_k,
        hf.scoring,
        renormalize=hf.norm_topk_prob,
        correction=correction,
        scale=float(hf.routed_scaling_factor),
        num_groups=num_groups,
        top_groups=top_groups,
        group_score=group_score,
    )
    size = hf.moe_intermediate_size
    moe = MoEConfig(routing, size, shared_size=size * (hf.n_shared_experts or 0), float32_scores=True)
    return [moe if is_mixture else None for is_mixture in places]
