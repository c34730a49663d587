"""GPT-OSS (arXiv 2508.10925): grouped-query attention with sinks, and a mixture of clamped-SwiGLU experts.

Every other layer has a sliding window. The router, the experts and the attention projections have biases.
"""

from __future__ import annotations

from typing import ClassVar

from atom_core.config import (
    ExpertNames,
    ModelConfig,
    MoEConfig,
    check_experts,
    read_attention,
    read_decoder,
    typed_windows,
    windowed,
)
from atom_core.hf_config import Experts, HfConfig, Number, RopeKeys, Size, Tokens
from atom_core.models.decoder import DecoderForCausalLM
from atom_core.types import SWIGLU_LIMIT, SWIGLU_STEEPNESS, RoutingConfig

#: The rope of a configuration that has none.
_ROPE = RopeKeys(rope_type="yarn", factor=32.0, truncate=False, original_max_position_embeddings=4096)


class GptOssKeys(HfConfig):
    """See the module's text."""

    model_types: ClassVar[tuple[str, ...]] = ("gpt_oss",)
    default_theta: ClassVar[float] = 150000.0
    fixed: ClassVar[dict[str, tuple[object, ...]]] = {
        "swiglu_alpha": (SWIGLU_STEEPNESS,),
        "swiglu_limit": (SWIGLU_LIMIT,),
        "norm_topk_prob": (True,),
        "scoring_func": ("softmax",),
    }

    num_key_value_heads: int | None = 8
    head_dim: Size | None = 64
    rms_norm_eps: Number = 1e-5
    sliding_window: Tokens | None = 128
    layer_types: list[str] | None = None
    attention_bias: bool = True
    num_local_experts: Experts = 128
    num_experts_per_tok: Experts = 4

    @property
    def rope_keys(self) -> RopeKeys:
        """See :class:`HfConfig`; the family's default where the configuration has no rope."""
        return super().rope_keys if self.rope_scaling or self.rope_parameters else _ROPE

    def windows(self) -> list[int | None]:
        """One window a layer; without ``layer_types``, every other layer's."""
        kinds = ("sliding_attention", "full_attention")
        types = self.layer_types or [kinds[index % 2] for index in range(self.num_hidden_layers)]
        if self.sliding_window is None and "sliding_attention" in types:
            raise ValueError("sliding_window is null, but layer_types names layers of sliding_attention; give a size.")
        return typed_windows(types, self.sliding_window, self.num_hidden_layers)


class GptOssForCausalLM(DecoderForCausalLM):
    """See the module's text."""

    schema = GptOssKeys

    @classmethod
    def read_config(cls, hf: GptOssKeys) -> ModelConfig:
        """See :meth:`DecoderForCausalLM.read_config`."""
        bias, num_layers = hf.attention_bias, hf.num_hidden_layers
        check_experts(hf.num_local_experts, hf.num_experts_per_tok, "num_local_experts")
        # Renormalizing the softmax over all experts gives the softmax over the chosen ones.
        routing = RoutingConfig(hf.num_local_experts, hf.num_experts_per_tok, "softmax", renormalize=True)
        names = ExpertNames(router="router", gate="gate_up_proj", up="gate_up_proj", down="down_proj")
        moe = MoEConfig(routing, hf.intermediate_size, names, bias=True, fused=True)
        attention = read_attention(hf, qkv_bias=bias, out_bias=bias, sinks=True)
        mixers = windowed(attention, hf.windows())
        return read_decoder(hf, mixers, mixtures=[moe] * num_layers, activation="clamped_swiglu")
