"""Hybrid models: what SGLang takes otherwise than their checkpoints say, put right by its own arguments, or refused."""

from __future__ import annotations

import json
from typing import Any

from sglang.srt.arg_groups.model_override_base import resolving_view
from sglang.srt.arg_groups.overrides import declare_resolution
from sglang.srt.environ import envs
from sglang.srt.utils.hf_transformers.config import get_config

from atom_core.models.registry import supported_architectures
from atom_plugin.common.checkpoint_config import check_overrides
from atom_plugin.sglang import our_backends
from atom_plugin.sglang.checkpoint_config import file_of, is_hybrid, values_of
from atom_plugin.sglang.hybrids import (
    INTERVAL,
    interval_of,
    keeps_prefixes_by_tokens,
    refused_in_configuration,
    refused_with_states,
)


def resolve_hybrid(server_args: Any) -> None:
    """Declare what a hybrid model needs, before SGLang has read the configuration.

    Raises:
        ValueError: see :func:`overrides`.
    """
    view = resolving_view(server_args)
    hf_config = get_config(
        view.model_path,
        trust_remote_code=view.trust_remote_code,
        revision=view.revision,
        model_override_args=json.loads(view.json_model_override_args),
        model_config_parser=view.model_config_parser,
    )
    if is_hybrid(hf_config) and hf_config.architectures[0] in supported_architectures():
        declare_resolution(server_args, __name__, **overrides(view, hf_config))


def overrides(view: Any, hf_config: Any) -> dict[str, Any]:
    """Server arguments for a hybrid model: pools for its layers, and text only.

    Args:
        view: the arguments so far.
        hf_config: of the model, as SGLang reads it.

    Raises:
        ValueError: SGLang cannot express which layers have full attention, an override is where nothing reads it, or
            see :func:`.hybrids.refused_in_configuration`.
    """
    text, architecture = hf_config.get_text_config(), hf_config.architectures[0]
    result: dict[str, Any] = {}
    for reason in refused_in_configuration(view, architecture, view.device, text is not hf_config):
        raise ValueError(reason)
    if keeps_prefixes_by_tokens(view, view.device):
        result["disable_overlap_schedule"] = True  # with overlap SGLang would not
    if text is not hf_config:
        given = json.loads(view.json_model_override_args)
        check_overrides("--json-model-override-args", given, file_of(hf_config), architecture)
        result["enable_multimodal"] = False
    values = values_of(hf_config)
    interval = interval_of(architecture, values.get("text_config", values))
    if interval != getattr(text, INTERVAL, None):
        given = json.loads(view.json_model_override_args)
        (given if text is hf_config else given.setdefault("text_config", {}))[INTERVAL] = interval
        result["json_model_override_args"] = json.dumps(given)
    return result


def check_states(view: Any, hf_config: Any, attention: str) -> None:
    """Refuse what models with linear attention do not support.

    Args:
        view: SGLang's resolving view of the server's arguments.
        hf_config: of the model.
        attention: the backend of its full attention.

    Raises:
        ValueError: see :func:`.hybrids.refused_with_states`.
    """
    dtype = envs.SGLANG_MAMBA_SSM_DTYPE.get() or getattr(hf_config.get_text_config(), "mamba_ssm_dtype", None)
    for reason in refused_with_states(view, attention, our_backends(), dtype):
        raise ValueError(reason)
