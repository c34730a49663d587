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
from atom_plugin.sglang.hybrids import INTERVAL, interval_of, refused_with_states


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
        ValueError: SGLang cannot express which layers have full attention, or images are asked for.
    """
    text, architecture = hf_config.get_text_config(), hf_config.architectures[0]
    result: dict[str, Any] = {}
    if view.device == "cpu" and view.mamba_radix_cache_strategy == "auto":
        # With overlap, or with pages, SGLang keeps states for prefixes in a way that it has for accelerators only.
        result["disable_overlap_schedule"] = True
        if (view.page_size or 1) > 1 and not view.disable_radix_cache:
            raise ValueError(
                f"--page-size {view.page_size} with prefix caching is not supported on a CPU for {architecture}: "
                "SGLang keeps the states of prefixes by single tokens there. Leave it out, or add "
                "--disable-radix-cache."
            )
    if text is not hf_config:
        given = json.loads(view.json_model_override_args)
        check_overrides("--json-model-override-args", given, file_of(hf_config), architecture)
        if view.enable_multimodal:
            raise ValueError(
                f"atom-plugin has only the text of {architecture}: leave out --enable-multimodal, or unset "
                "SGLANG_EXTERNAL_MODEL_PACKAGE."
            )
        if view.tokenizer_worker_num > 1:
            raise ValueError(
                f"--tokenizer-worker-num {view.tokenizer_worker_num} is not supported by atom-plugin for "
                f"{architecture}: SGLang loads no plug-in in such workers, and images in a request would be left out "
                "instead of refused. Leave it out."
            )
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
