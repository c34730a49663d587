"""The families with mixtures of experts, under the names that checkpoints give their architectures."""

from __future__ import annotations

from atom_plugin.sglang.causal_lm import AtomForCausalLM


class Glm4MoeForCausalLM(AtomForCausalLM):
    """GLM-4.5 and 4.6."""


class GptOssForCausalLM(AtomForCausalLM):
    """GPT-OSS."""


class MixtralForCausalLM(AtomForCausalLM):
    """Mixtral."""


class Qwen3MoeForCausalLM(AtomForCausalLM):
    """Qwen3-MoE."""


EntryClass = [Glm4MoeForCausalLM, GptOssForCausalLM, MixtralForCausalLM, Qwen3MoeForCausalLM]
