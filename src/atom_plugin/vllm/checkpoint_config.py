"""The config values of a checkpoint, read from vLLM's configuration; values that overrides removed are restored."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from atom_plugin.common.checkpoint_config import config_values, file_values, untied

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
    return untied(values, model, model_config.revision)


def values_of_draft(vllm_config: VllmConfig, architecture: str) -> dict[str, Any]:
    """The config values of a multi-token-prediction draft of a target of ``architecture``."""
    assert vllm_config.speculative_config is not None
    values = values_of(vllm_config.speculative_config.draft_model_config, architecture)
    # vLLM has set model_type to "deepseek_mtp".
    return {**values, "model_type": vllm_config.model_config.hf_text_config.model_type}
