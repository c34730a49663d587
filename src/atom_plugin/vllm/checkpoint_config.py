"""What our models read of vLLM's configuration of a model: its values, with what overrides took away."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from atom_plugin.common.checkpoint_config import config_values, file_values, untied

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

#: What vLLM writes into the configuration of layers that draft (``SpeculativeConfig.hf_config_override``).
_ADDED = ("n_predict",)
#: A key by which a configuration, or ``--hf-overrides``, asks for the head's dtype; vLLM's alone, which reads it.
_HEAD_DTYPE = "head_dtype"


def values_of(model_config: ModelConfig, architecture: str) -> dict[str, Any]:
    """The configuration of a model that is served by our class of ``architecture``."""
    model = str(model_config.model)
    file = file_values(model, model_config.revision)
    values = config_values(model_config.hf_text_config, file, architecture, _ADDED)
    values.pop(_HEAD_DTYPE, None)
    return untied(values, model, model_config.revision)


def values_of_draft(vllm_config: VllmConfig, architecture: str) -> dict[str, Any]:
    """The configuration of the checkpoint of ``architecture`` whose own layers draft."""
    assert vllm_config.speculative_config is not None
    values = values_of(vllm_config.speculative_config.draft_model_config, architecture)
    # vLLM calls the type of these layers "deepseek_mtp".
    return {**values, "model_type": vllm_config.model_config.hf_text_config.model_type}
