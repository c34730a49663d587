"""GLM-4.5, 4.6: mixtures of experts behind some dense layers, scored by sigmoids, with an expert that all tokens share.

Half of a head is rotated. The layers that checkpoints have behind the last, to draft further tokens with, are left out.
"""

from __future__ import annotations

from atom_core.config import HfConfig, ModelConfig, MoEConfig, RoutingConfig, read_decoder, read_experts, read_groups
from atom_core.models.decoder import DecoderForCausalLM


class Glm4MoeForCausalLM(DecoderForCausalLM):
    """See the module's text."""

    @classmethod
    def read_config(cls, hf: HfConfig) -> ModelConfig:
        """See :meth:`DecoderForCausalLM.read_config`."""
        hf = hf.with_defaults(partial_rotary_factor=0.5, rms_norm_eps=1e-5)
        return read_decoder(
            hf,
            qkv_bias=hf.get("attention_bias", False),
            qk_norm=hf.get("use_qk_norm", False),
            mixtures=_mixtures(hf),
            draft_layers=hf.get("num_nextn_predict_layers", 1),
        )


def _mixtures(hf: HfConfig) -> list[MoEConfig | None]:
    num_experts, top_k = read_experts(hf, ("n_routed_experts",), 128, 8)
    num_groups, top_groups = read_groups(hf, num_experts, top_k)
    routing = RoutingConfig(
        num_experts,
        top_k,
        "sigmoid",
        renormalize=hf.get("norm_topk_prob", True),
        correction=True,
        scale=float(hf.get("routed_scaling_factor", 1.0)),
        num_groups=num_groups,
        top_groups=top_groups,
    )
    size = hf.positive("moe_intermediate_size", 1408)
    moe = MoEConfig(routing, size, shared_size=size * hf.positive("n_shared_experts", 1), float32_router=True)
    dense = hf.get("first_k_dense_replace", 1)
    return [None if index < dense else moe for index in range(hf.positive("num_hidden_layers"))]
