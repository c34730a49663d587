"""The families with two kinds of attention, under their architectures' names in checkpoints."""

from __future__ import annotations

from atom_plugin.sglang.causal_lm import AtomForCausalLM


class Qwen3NextForCausalLM(AtomForCausalLM):
    """Qwen3-Next."""


class Qwen3_5ForCausalLM(AtomForCausalLM):
    """Qwen3.5, dense."""


class Qwen3_5MoeForCausalLM(AtomForCausalLM):
    """Qwen3.5 with mixtures of experts."""


class Qwen3_5ForConditionalGeneration(AtomForCausalLM):
    """The text of Qwen3.5, dense."""


class Qwen3_5MoeForConditionalGeneration(AtomForCausalLM):
    """The text of Qwen3.5 with mixtures of experts."""


EntryClass = [
    Qwen3NextForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3_5MoeForCausalLM,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeForConditionalGeneration,
]
