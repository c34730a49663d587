"""The dense families, under their architectures' names in checkpoints."""

from __future__ import annotations

from atom_plugin.sglang.causal_lm import AtomForCausalLM


class LlamaForCausalLM(AtomForCausalLM):
    """Llama 2 and 3.x."""


class MistralForCausalLM(AtomForCausalLM):
    """Mistral."""


class Qwen2ForCausalLM(AtomForCausalLM):
    """Qwen2 and Qwen2.5."""


class Qwen3ForCausalLM(AtomForCausalLM):
    """Qwen3."""


EntryClass = [LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM]
