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
                inner = inner.setdefault(each, {})
            inner[key] = _parsed(value)
    return {key: value for key, value in result.items() if key not in _NOT_OURS[command.framework.package]}


def overridden(values: Mapping[str, Any], overrides: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """``values`` of the configuration in ``folder``, with ``overrides``, as the adapters read them from a server's."""
    if not overrides:
        return dict(values)
    changed = dict(values)
    for key, value in overrides.items():
        before = values.get(key)
        is_part = key.endswith("_config") and isinstance(value, Mapping) and isinstance(before, Mapping)
        # A part keeps its other keys. Other objects, as those of rope, are replaced.
        changed[key] = {**before, **value} if is_part and before is not None else value
    try:
        from atom_plugin.common.checkpoint_config import config_values, file_values
    except ModuleNotFoundError:  # huggingface_hub comes with the frameworks
        return changed
    return config_values(changed, file_values(str(folder)))


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
