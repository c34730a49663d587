"""Hybrid models: what SGLang takes otherwise than their checkpoints say, put right by its own arguments, or refused."""

from __future__ import annotations

import json
from typing import Any

from sglang.srt.arg_groups.model_override_base import resolving_view
from sglang.srt.arg_groups.overrides import declare_resolution
from sglang.srt.managers.io_struct import GenerateReqInput
from sglang.srt.utils.hf_transformers.config import get_config

from atom_core.models.registry import supported_architectures
from atom_plugin.sglang.checkpoint_config import is_hybrid, values_of

#: SGLang's only way to say which layers have full attention: every n-th. Files saved by Transformers 5 lack it.
INTERVAL, _DEFAULT = "full_attention_interval", 4
FULL = "full_attention"


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
        # With overlap SGLang keeps states for prefixes in a way that it has for accelerators only.
        result["disable_overlap_schedule"] = True
    if text is not hf_config:
        if view.enable_multimodal:
            raise ValueError(
                f"atom-plugin has only the text of {architecture}: leave out --enable-multimodal, or unset "
                "SGLANG_EXTERNAL_MODEL_PACKAGE."
            )
        result["enable_multimodal"] = False
    values = values_of(hf_config)
    interval = interval_of(architecture, values.get("text_config", values))
    if interval != getattr(text, INTERVAL, None):
        given = json.loads(view.json_model_override_args)
        (given if text is hf_config else given.setdefault("text_config", {}))[INTERVAL] = interval
        result["json_model_override_args"] = json.dumps(given)
    return result


def interval_of(architecture: str, values: dict[str, Any]) -> int:
    """Which layers have full attention: each whose number, counted from 1, is a multiple of this.

    Args:
        architecture: for the error.
        values: of the text's configuration.

    Raises:
        ValueError: they are other layers.
    """
    kinds = values.get("layer_types")
    if kinds is None:
        return int(values.get(INTERVAL) or _DEFAULT)
    full = [number for number, kind in enumerate(kinds, 1) if kind == FULL]
    interval = full[0] if full else len(kinds) + 1
    if full != list(range(interval, len(kinds) + 1, interval)):
        raise ValueError(
            f"{architecture} has full attention in layers {[number - 1 for number in full]} (layer_types of "
            f"config.json). SGLang can keep the tokens of such a model only if it is every n-th layer ({INTERVAL})."
        )
    return interval


def refuse_media(model_config: Any, request: Any) -> None:
    """Refuse a request with images, video or sound to a model of which only the text is served.

    Raises:
        ValueError: it has some; SGLang answers with the message.
    """
    hf_config = model_config.hf_config
    if hf_config.get_text_config() is hf_config or not is_hybrid(hf_config) or model_config.is_multimodal:
        return
    if isinstance(request, GenerateReqInput) and request.contains_mm_input():
        raise ValueError(
            f"atom-plugin serves only the text of {hf_config.architectures[0]}: a request cannot have images, video or "
            "sound."
        )
