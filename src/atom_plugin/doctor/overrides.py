"""What a command changes in a checkpoint's configuration: vLLM's ``--hf-overrides``, and SGLang's flag for it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from atom_plugin.doctor.command import Command
from atom_plugin.doctor.framework import SGLANG, VLLM, Framework

_FLAGS = {VLLM.package: "--hf-overrides", SGLANG.package: "--json-model-override-args"}
#: Keys that the framework reads for itself, and those that have no effect there.
_NOT_OURS = {VLLM.package: ("head_dtype", "dtype", "torch_dtype"), SGLANG.package: ("enable_lm_head_fp32",)}

#: Configurations within one. They keep the keys that an override leaves out; in vLLM so do objects in them, such as
#: those of rope. Of other objects SGLang keeps them in these two alone, vLLM in none.
_PARTS, _ROPE = ("text_config", "vision_config"), ("rope_scaling", "rope_parameters")


def overrides_of(command: Command) -> dict[str, Any]:
    """The keys of ``config.json`` that a command sets for the model; none if its JSON cannot be read."""
    if command.framework is None:
        return {}
    flag = _FLAGS[command.framework.package]
    given = _parsed(command.flags.get(flag, ""))
    result = dict(given) if isinstance(given, Mapping) else {}
    for name, value in command.flags.items():
        first, _, path = name.partition(".")
        if path and first == flag:
            *outer, key = path.replace("-", "_").split(".")
            inner = result
            for each in outer:
                if not isinstance(inner.get(each), dict):
                    inner[each] = {}
                inner = inner[each]
            inner[key] = _parsed(value)
    return {key: value for key, value in result.items() if key not in _NOT_OURS[command.framework.package]}


def overridden(
    values: Mapping[str, Any], overrides: Mapping[str, Any], folder: Path, framework: Framework
) -> dict[str, Any]:
    """``values`` of the configuration in ``folder``, with ``overrides``, as the adapters read them from a server's."""
    if not overrides:
        return dict(values)
    changed = dict(values)
    for key, value in overrides.items():
        before = values.get(key)
        if not isinstance(before, Mapping) or not isinstance(value, Mapping):
            changed[key] = value
        elif key in _PARTS and framework is VLLM:
            changed[key] = _merged(before, value)
        elif key in _PARTS or (key in _ROPE and framework is SGLANG):
            changed[key] = {**before, **value}
        else:
            changed[key] = value
    try:
        from atom_plugin.common.checkpoint_config import config_values, file_values
    except ModuleNotFoundError:  # huggingface_hub comes with the frameworks
        return changed
    return config_values(changed, file_values(str(folder)))


def _merged(before: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    result = dict(before)
    for key, value in changes.items():
        inner = before.get(key)
        both = isinstance(inner, Mapping) and isinstance(value, Mapping)
        result[key] = _merged(inner, value) if both and inner is not None else value
    return result


def check_place(framework: Framework, overrides: Mapping[str, Any], folder: Path) -> None:
    """Check that ``overrides`` of a multimodal checkpoint's language model are where it is read.

    Raises:
        ValueError: see :func:`atom_plugin.common.checkpoint_config.check_overrides`.
    """
    from atom_core.checkpoint import read_config_json  # imports torch
    from atom_core.models.registry import MODELS

    try:
        from atom_plugin.common.checkpoint_config import check_overrides
    except ModuleNotFoundError:  # huggingface_hub comes with the frameworks
        return
    file = read_config_json(folder)
    for architecture in MODELS.keys() & set(file.get("architectures") or ()):
        check_overrides(_FLAGS[framework.package], overrides, file, architecture)


def _parsed(value: str) -> Any:
    try:
        return json.loads(value)
    except ValueError:
        return value
