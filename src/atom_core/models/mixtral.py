"""Mixtral: Mistral with a mixture of experts in every layer, under names of its own in checkpoints."""

from __future__ import annotations

from atom_core.config import ExpertNames, HfConfig, ModelConfig, MoEConfig, RoutingConfig, read_decoder, read_experts
from atom_core.models.decoder import DecoderForCausalLM

_NAMES = ExpertNames("block_sparse_moe", gate="w1", up="w3", down="w2")


class MixtralForCausalLM(DecoderForCausalLM):
    """See the module's text."""

    @classmethod
    def read_config(cls, hf: HfConfig) -> ModelConfig:
        """See :meth:`DecoderForCausalLM.read_config`."""
        hf = hf.with_defaults(sliding_window=None, rope_theta=1000000.0, rms_norm_eps=1e-5)
        num_layers = hf.positive("num_hidden_layers")
        num_experts, top_k = read_experts(hf, ("num_local_experts",), 8, 2)
        # The chosen experts' share of the softmax over all of them, which is the softmax over the chosen ones.
        routing = RoutingConfig(num_experts, top_k, "softmax", renormalize=True)
        moe = MoEConfig(routing, hf.positive("intermediate_size"), _NAMES)
        return read_decoder(hf, windows=[hf.window()] * num_layers, mixtures=[moe] * num_layers)
