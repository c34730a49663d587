"""Qwen3-Next: three layers of linear attention (Gated DeltaNet, arXiv 2412.06464) for each one of full attention.

Full attention has an output gate (arXiv 2505.06708) and rotates a quarter of each head. Norms are zero-centred. Layers
have a mixture of experts with a gated shared expert, or a dense network. This model does not load the checkpoint's
draft layers (``mtp.*``).
"""

from __future__ import annotations

from typing import ClassVar

from atom_core.config import (
    AttentionConfig,
    ExpertNames,
    GatedDeltaNetConfig,
    ModelConfig,
    MoEConfig,
    check_experts,
    read_attention,
    read_decoder,
)
from atom_core.hf_config import DraftLayers, Experts, HfConfig, Index, Size
from atom_core.models.decoder import DecoderForCausalLM
from atom_core.types import RoutingConfig

_KINDS = ("linear_attention", "full_attention")
#: The names of a mixture's shared expert and of its gate.
NAMES = ExpertNames(shared="shared_expert")


class HybridKeys(HfConfig):
    """What Qwen3-Next and Qwen3.5 share."""

    default_partial: ClassVar[float | None] = 0.25
    fixed: ClassVar[dict[str, tuple[object, ...]]] = {
        "attn_output_gate": (True,),
        "output_gate_type": ("silu", "swish"),
        "layer_scale": (False,),
        "use_sliding_window": (False,),
    }

    head_dim: Size | None = 256
    attention_bias: bool = False
    layer_types: list[str] | None = None
    full_attention_interval: Size = 4
    linear_conv_kernel_dim: Size = 4
    linear_key_head_dim: Size = 128
    linear_value_head_dim: Size = 128
    linear_num_key_heads: Size = 16
    linear_num_value_heads: Size = 32
    mamba_ssm_dtype: str | None = None
    """Of the states; the frameworks read it."""

    #: See :class:`GatedDeltaNetConfig`.
    fused_projections: ClassVar[bool]

    def mixers(self) -> list[AttentionConfig | GatedDeltaNetConfig]:
        """One a layer, as ``layer_types`` says.

        Raises:
            ValueError: unknown kinds, another count of them, no layer of full attention, or heads that do not match.
        """
        if self.hidden_act not in ("silu", "swish"):
            raise ValueError(
                f"hidden_act={self.hidden_act!r} is not supported for {self.architecture}, where the convolutions of "
                "linear attention have it too; supported: 'silu'."
            )
        types, count = self.layer_types, self.num_hidden_layers
        if types is None:
            every = self.full_attention_interval
            types = ["linear_attention" if (index + 1) % every else "full_attention" for index in range(count)]
        if len(types) != count:
            raise ValueError(f"layer_types names {len(types)} layers, num_hidden_layers={count}.")
        if unknown := sorted(set(types) - set(_KINDS)):
            raise ValueError(f"layer_types has {unknown}; supported: {', '.join(map(repr, _KINDS))}.")
        if "full_attention" not in types:
            raise ValueError("layer_types has no 'full_attention'; supported: at least one such layer.")
        if self.linear_num_value_heads % self.linear_num_key_heads:
            raise ValueError(
                f"linear_num_value_heads={self.linear_num_value_heads} is not a multiple of linear_num_key_heads="
                f"{self.linear_num_key_heads}: each key head must serve the same number of value heads."
            )
        if self.linear_conv_kernel_dim < 2:
            raise ValueError(
                f"linear_conv_kernel_dim={self.linear_conv_kernel_dim} is not supported; supported: 2 or more."
            )
        attention = read_attention(
            self, qkv_bias=self.attention_bias, out_bias=self.attention_bias, qk_norm=True, output_gate=True
        )
        linear = GatedDeltaNetConfig(
            self.linear_num_key_heads,
            self.linear_num_value_heads,
            self.linear_key_head_dim,
            self.linear_value_head_dim,
            self.linear_conv_kernel_dim,
            self.fused_projections,
        )
        return [linear if kind == "linear_attention" else attention for kind in types]


class Qwen3NextKeys(HybridKeys):
    """See the module's text."""

    model_types: ClassVar[tuple[str, ...]] = ("qwen3_next",)
    fused_projections = True

    num_key_value_heads: int | None = 2
    num_experts: Experts = 512
    num_experts_per_tok: Experts = 10
    moe_intermediate_size: Size = 512
    shared_expert_intermediate_size: Size = 512
    norm_topk_prob: bool = True
    decoder_sparse_step: Size = 1
    mlp_only_layers: list[Index] | None = None
    num_nextn_predict_layers: DraftLayers | None = None


class Qwen3NextForCausalLM(DecoderForCausalLM):
    """See the module's text."""

    schema = Qwen3NextKeys
    draft_prefix = "mtp."

    @classmethod
    def read_config(cls, hf: Qwen3NextKeys) -> ModelConfig:
        """See :meth:`DecoderForCausalLM.read_config`."""
        every, dense = hf.decoder_sparse_step, hf.mlp_only_layers or ()
        moe = gated_mixture(
            hf.num_experts,
            hf.num_experts_per_tok,
            hf.moe_intermediate_size,
            hf.shared_expert_intermediate_size,
            renormalize=hf.norm_topk_prob,
        )
        mixtures = [None if at in dense or (at + 1) % every else moe for at in range(hf.num_hidden_layers)]
        return read_decoder(hf, hf.mixers(), mixtures=mixtures, zero_centered_norms=True)


def gated_mixture(experts: int, top_k: int, size: int, shared_size: int, *, renormalize: bool) -> MoEConfig:
    """Softmax routing, and a shared expert behind a gate."""
    check_experts(experts, top_k, "num_experts")
    routing = RoutingConfig(experts, top_k, "softmax", renormalize=renormalize)
    return MoEConfig(
        routing,
        size,
        names=NAMES,
        shared_size=shared_size,
        shared_size_key="shared_expert_intermediate_size",
        shared_gate=True,
    )
