"""The supported architectures, by their Hugging Face names. This module imports no model and no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from atom_core.models.decoder import DecoderForCausalLM
    from atom_core.models.draft import DraftModel


@dataclass(frozen=True)
class ModelEntry:
    """One architecture and the class that runs it."""

    architecture: str
    """As ``config.json`` spells it, and also the class's name."""
    module: str
    family: str
    quantized: bool = True
    """Whether the family supports the quantisation schemes of the other families."""
    own_quantizations: tuple[str, ...] = ()
    """Quantisation schemes of this family alone."""


_ENTRIES = (
    ModelEntry("DeepseekV2ForCausalLM", "atom_core.models.deepseek", "DeepSeek V2, V2-Lite"),
    ModelEntry("DeepseekV3ForCausalLM", "atom_core.models.deepseek", "DeepSeek V3, R1, Kimi K2"),
    ModelEntry("Glm4MoeForCausalLM", "atom_core.models.glm4_moe", "GLM-4.5, 4.6"),
    ModelEntry(
        "GptOssForCausalLM", "atom_core.models.gpt_oss", "GPT-OSS", quantized=False, own_quantizations=("mxfp4",)
    ),
    ModelEntry("LlamaForCausalLM", "atom_core.models.llama", "Llama 2, 3.x"),
    ModelEntry("MistralForCausalLM", "atom_core.models.mistral", "Mistral"),
    ModelEntry("MixtralForCausalLM", "atom_core.models.mixtral", "Mixtral"),
    ModelEntry("Qwen2ForCausalLM", "atom_core.models.qwen2", "Qwen2, Qwen2.5"),
    ModelEntry("Qwen3ForCausalLM", "atom_core.models.qwen3", "Qwen3"),
    ModelEntry("Qwen3MoeForCausalLM", "atom_core.models.qwen3_moe", "Qwen3-MoE"),
    ModelEntry("Qwen3NextForCausalLM", "atom_core.models.qwen3_next", "Qwen3-Next"),
    ModelEntry("Qwen3_5ForCausalLM", "atom_core.models.qwen3_5", "Qwen3.5, 3.6, 3.8"),
    ModelEntry(
        "Qwen3_5ForConditionalGeneration", "atom_core.models.qwen3_5", "Qwen3.5, 3.6, 3.8 with vision (text only)"
    ),
    ModelEntry("Qwen3_5MoeForCausalLM", "atom_core.models.qwen3_5", "Qwen3.5, 3.6, 3.8 MoE"),
    ModelEntry(
        "Qwen3_5MoeForConditionalGeneration",
        "atom_core.models.qwen3_5",
        "Qwen3.5, 3.6, 3.8 MoE with vision (text only)",
    ),
)

#: The module and the class of a checkpoint's draft layers, by its architecture.
DRAFTS: Mapping[str, tuple[str, str]] = {
    "DeepseekV3ForCausalLM": ("atom_core.models.deepseek_mtp", "DeepseekV3Draft"),
    "Qwen3NextForCausalLM": ("atom_core.models.qwen_mtp", "Qwen3NextDraft"),
    "Qwen3_5ForCausalLM": ("atom_core.models.qwen_mtp", "Qwen35Draft"),
    "Qwen3_5ForConditionalGeneration": ("atom_core.models.qwen_mtp", "Qwen35Draft"),
    "Qwen3_5MoeForCausalLM": ("atom_core.models.qwen_mtp", "Qwen35MoeDraft"),
    "Qwen3_5MoeForConditionalGeneration": ("atom_core.models.qwen_mtp", "Qwen35MoeDraft"),
}

MODELS: Mapping[str, ModelEntry] = {entry.architecture: entry for entry in _ENTRIES}


def supported_architectures() -> tuple[str, ...]:
    """All architecture names, sorted."""
    return tuple(sorted(MODELS))


def load_model_class(architecture: str) -> type[DecoderForCausalLM]:
    """Import the class of ``architecture``.

    Raises:
        ValueError: it is not supported.
    """
    entry = MODELS.get(architecture)
    if entry is None:
        raise ValueError(unsupported_architecture(architecture))
    model_class: type[DecoderForCausalLM] = getattr(import_module(entry.module), entry.architecture)
    return model_class


def load_draft_class(architecture: str) -> type[DraftModel]:
    """Import the class of the draft layers in checkpoints of ``architecture``.

    Raises:
        ValueError: there is none.
    """
    if architecture not in DRAFTS:
        raise ValueError(
            f"Drafts by layers of the checkpoint itself (multi-token prediction) are not supported for "
            f"{architecture}; supported: {', '.join(sorted(DRAFTS))}."
        )
    module, name = DRAFTS[architecture]
    draft_class: type[DraftModel] = getattr(import_module(module), name)
    return draft_class


def unsupported_architecture(architecture: str) -> str:
    """The error message for an unsupported ``architecture``."""
    return f"Architecture {architecture!r} is not supported; supported: {', '.join(supported_architectures())}."
