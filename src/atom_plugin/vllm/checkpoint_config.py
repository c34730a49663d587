"""The config values of a checkpoint, read from vLLM's configuration; values that overrides removed are restored."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from atom_core.language_model import TIED
from atom_plugin.common.checkpoint_config import ROPE_KEYS, config_values, file_values, untied

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

#: Keys that vLLM writes into the config of a multi-token-prediction draft (``SpeculativeConfig.hf_config_override``).
_ADDED = ("n_predict",)
#: vLLM's own key for the head's dtype, in a config or ``--hf-overrides``. vLLM reads it.
_HEAD_DTYPE = "head_dtype"


def values_of(model_config: ModelConfig, architecture: str) -> dict[str, Any]:
    """The config values of a model that our class of ``architecture`` serves."""
    model = str(model_config.model)
    file = file_values(model, model_config.revision)
    values = config_values(model_config.hf_text_config, file, architecture, _ADDED)
    values.pop(_HEAD_DTYPE, None)
    if model_config.hf_config is not model_config.hf_text_config and TIED in file:
        values[TIED] = model_config.hf_config.tie_word_embeddings
    return untied(values, model, model_config.revision)


def values_of_draft(vllm_config: VllmConfig, architecture: str) -> dict[str, Any]:
    """The config values of a multi-token-prediction draft of a target of ``architecture``.

    Its rope is the target's, at whose positions it drafts: vLLM gives ``--hf-overrides`` to the target alone.
    """
    assert vllm_config.speculative_config is not None
    draft = values_of(vllm_config.speculative_config.draft_model_config, architecture)
    target = values_of(vllm_config.model_config, architecture)
    # Of the draft, vLLM has set model_type to "deepseek_mtp".
    taken = ("model_type", *ROPE_KEYS)
    values = {key: value for key, value in draft.items() if key not in taken}
    return values | {key: target[key] for key in taken if key in target}
