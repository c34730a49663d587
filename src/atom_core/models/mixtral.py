"""Mixtral (arXiv 2401.04088): Mistral's attention, and a mixture of SwiGLU experts in every layer.

A softmax router chooses the experts. Checkpoints have their own names for the matrices (w1, w2, w3).
"""

from __future__ import annotations

from typing import ClassVar

from atom_core.config import (
    ExpertNames,
    ModelConfig,
    MoEConfig,
    check_experts,
    every_window_or_none,
    read_attention,
    read_decoder,
    windowed,
)
from atom_core.hf_config import Experts, HfConfig, Number, Tokens
from atom_core.models.decoder import DecoderForCausalLM
from atom_core.types import RoutingConfig

_NAMES = ExpertNames("block_sparse_moe", gate="w1", up="w3", down="w2")


class MixtralKeys(HfConfig):
    """See the module's text."""

    model_types: ClassVar[tuple[str, ...]] = ("mixtral",)
    default_theta: ClassVar[float] = 1e6
    #: The weights of the chosen experts are always renormalized.
    fixed: ClassVar[dict[str, tuple[object, ...]]] = {"norm_topk_prob": (True,), "scoring_func": ("softmax",)}

    num_key_value_heads: int | None = 8
    rms_norm_eps: Number = 1e-5
    sliding_window: Tokens | None = None
    layer_types: list[str] | None = None
    num_local_experts: Experts = 8
    num_experts_per_tok: Experts = 2


class MixtralForCausalLM(DecoderForCausalLM):
    """See the module's text."""

    schema = MixtralKeys

    @classmethod
    def read_config(cls, hf: MixtralKeys) -> ModelConfig:
        """See :meth:`DecoderForCausalLM.read_config`."""
        num_layers, num_experts, top_k = hf.num_hidden_layers, hf.num_local_experts, hf.num_experts_per_tok
        check_experts(num_experts, top_k, "num_local_experts")
        # Renormalizing the softmax over all experts gives the softmax over the chosen ones.
        routing = RoutingConfig(num_experts, top_k, "softmax", renormalize=True)
        moe = MoEConfig(routing, hf.intermediate_size, _NAMES)
        windows = every_window_or_none(hf.layer_types, hf.sliding_window, num_layers)
        return read_decoder(hf, windowed(read_attention(hf), windows), mixtures=[moe] * num_layers)
