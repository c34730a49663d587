"""Drafts made of a checkpoint's own layers, under SGLang's names."""

from __future__ import annotations

from atom_plugin.sglang.draft import AtomDraft


class DeepseekV3ForCausalLMNextN(AtomDraft):
    """DeepSeek V3 and R1."""

    architecture = "DeepseekV3ForCausalLM"


EntryClass = [DeepseekV3ForCausalLMNextN]
