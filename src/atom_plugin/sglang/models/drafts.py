"""Drafts made of a checkpoint's own layers, under SGLang's names."""

from __future__ import annotations

from atom_plugin.sglang.draft import AtomDraft


class DeepseekV3ForCausalLMNextN(AtomDraft):
    """DeepSeek V3 and R1."""

    architecture = "DeepseekV3ForCausalLM"


class Qwen3NextForCausalLMMTP(AtomDraft):
    """Qwen3-Next."""

    architecture = "Qwen3NextForCausalLM"


class Qwen3_5ForCausalLMMTP(AtomDraft):
    """Qwen3.5, dense and with mixtures, also the text of models with images."""


EntryClass = [DeepseekV3ForCausalLMNextN, Qwen3NextForCausalLMMTP, Qwen3_5ForCausalLMMTP]
