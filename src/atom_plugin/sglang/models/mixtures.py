"""The families with mixtures of experts, under their architectures' names in checkpoints."""

from __future__ import annotations

from atom_plugin.sglang.causal_lm import AtomForCausalLM


class DeepseekV2ForCausalLM(AtomForCausalLM):
    """DeepSeek V2 and V2-Lite."""


class DeepseekV3ForCausalLM(AtomForCausalLM):
    """DeepSeek V3 and R1, Kimi K2."""


class Glm4MoeForCausalLM(AtomForCausalLM):
    """GLM-4.5 and 4.6."""


class GptOssForCausalLM(AtomForCausalLM):
    """GPT-OSS."""


class MixtralForCausalLM(AtomForCausalLM):
    """Mixtral."""


class QuantMixtralForCausalLM(AtomForCausalLM):
    """Mixtral, by the name that SGLang looks for if its weights are quantised in some ways."""

    architecture = "MixtralForCausalLM"


class Qwen3MoeForCausalLM(AtomForCausalLM):
    """Qwen3-MoE."""


EntryClass = [
    DeepseekV2ForCausalLM,
    DeepseekV3ForCausalLM,
    Glm4MoeForCausalLM,
    GptOssForCausalLM,
    MixtralForCausalLM,
    QuantMixtralForCausalLM,
    Qwen3MoeForCausalLM,
]
