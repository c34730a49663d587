"""GLM-4.5 and 4.6 (arXiv 2508.06471): grouped-query attention that rotates half of each head, and SwiGLU experts.

The first layers are dense. The others have routed experts, scored by sigmoids, and shared experts for all tokens. The
checkpoint's draft layers are not loaded.
"""

from __future__ import annotations

from typing import ClassVar

from atom_core.config import ModelConfig, MoEConfig, check_experts, check_groups, read_attention, read_decoder
from atom_core.hf_config import DraftLayers, Experts, HfConfig, Index, Number, Size
from atom_core.models.decoder import DecoderForCausalLM
from atom_core.types import RoutingConfig


class Glm4MoeKeys(HfConfig):
    """See the module's text."""

    model_types: ClassVar[tuple[str, ...]] = ("glm4_moe",)
    default_partial: ClassVar[float | None] = 0.5
    fixed: ClassVar[dict[str, tuple[object, ...]]] = {"scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",)}

    num_key_value_heads: int | None = 8
    rms_norm_eps: Number = 1e-5
    attention_bias: bool = False
    use_qk_norm: bool = False
    n_routed_experts: Experts = 128
    num_experts_per_tok: Experts = 8
    n_shared_experts: Experts = 1
    n_group: Experts = 1
    topk_group: Experts = 1
    moe_intermediate_size: Size = 1408
    routed_scaling_factor: Number = 1.0
    norm_topk_prob: bool = True
    first_k_dense_replace: Index = 1
    num_nextn_predict_layers: DraftLayers = 1


class Glm4MoeForCausalLM(DecoderForCausalLM):
    """See the module's text."""

    schema = Glm4MoeKeys

    @classmethod
    def read_config(cls, hf: Glm4MoeKeys) -> ModelConfig:
        """See :meth:`DecoderForCausalLM.read_config`."""
        attention = read_attention(hf, qkv_bias=hf.attention_bias, qk_norm=hf.use_qk_norm)
        mixers, drafts = [attention] * hf.num_hidden_layers, hf.num_nextn_predict_layers
        return read_decoder(hf, mixers, mixtures=_mixtures(hf), draft_layers=drafts)


def _mixtures(hf: Glm4MoeKeys) -> list[MoEConfig | None]:
    check_experts(hf.n_routed_experts, hf.num_experts_per_tok, "n_routed_experts")
    check_groups(hf.n_group, hf.topk_group, hf.n_routed_experts, hf.num_experts_per_tok)
    routing = RoutingConfig(
        hf.n_routed_experts,
        hf.num_experts_per_tok,
        "sigmoid",
        renormalize=hf.norm_topk_prob,
        correction=True,
        scale=float(hf.routed_scaling_factor),
        num_groups=hf.n_group,
        top_groups=hf.topk_group,
    )
    size = hf.moe_intermediate_size
    moe = MoEConfig(routing, size, shared_size=size * hf.n_shared_experts, float32_router=True)
    return [None if index < hf.first_k_dense_replace else moe for index in range(hf.num_hidden_layers)]
