"""The families with mixtures of experts, under the names that checkpoints give their architectures."""

from __future__ import annotations

from atom_plugin.sglang.causal_lm import AtomForCausalLM


class MixtralForCausalLM(AtomForCausalLM):
    """Mixtral."""


class Qwen3MoeForCausalLM(AtomForCausalLM):
    """Qwen3-MoE."""


EntryClass = [MixtralForCausalLM, Qwen3MoeForCausalLM]
