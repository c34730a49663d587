"""The config values of a checkpoint, read from SGLang's configuration; values that overrides removed are restored.

SGLang has classes of its own for Qwen3-Next and Qwen3.5, older than what Transformers 5 saves: they know neither
``layer_types`` nor ``rope_parameters``, and have defaults in their place. So of these models the file counts, and of
SGLang's object what has been changed in it.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from sglang.srt.configs.qwen3_next import Qwen3NextConfig

from atom_plugin.common.checkpoint_config import config_values, file_values, untied
from atom_plugin.sglang.padding import BEFORE_PADDING

#: SGLang's own key for a head in float32, like ``--enable-fp32-lm-head``.
FLOAT32_HEAD = "enable_lm_head_fp32"
#: Keys that SGLang's ``ModelConfig`` adds to every config.
_ADDED = ("context_len", "encoder_only", "language_only", "language_model_only", "swa_head_dim", "swa_v_head_dim")
#: Keys that it adds to hybrid models on a CPU.
_ADDED_ON_CPU = ("linear_num_key_heads_cpu", "linear_num_value_heads_cpu")
#: Key that it adds for the drafts of hybrid models.
_ADDED_FOR_DRAFTS = "num_nextn_predict_layers"


def values_of(hf_config: Any, architecture: str | None = None) -> dict[str, Any]:
    """The config values of a model, without padding, with ``architecture`` if SGLang has replaced it."""
    model = str(getattr(hf_config, "_name_or_path", ""))
    revision = getattr(hf_config, "_commit_hash", None)
    file = file_values(model, revision)
    values = hf_config.to_dict()
    if file and is_hybrid(hf_config):
        values = _changed(values, type(hf_config).from_dict(copy.deepcopy(dict(file))).to_dict(), file)
        _remove_added(values, file)
    values.pop(FLOAT32_HEAD, None)
    _undo_padding(values, file)
    # SGLang also adds v_head_dim if it equals head_dim.
    added = (*_ADDED, "v_head_dim") if values.get("v_head_dim") == values.get("head_dim") else _ADDED
    return untied(config_values(values, file, architecture, added), model, revision)


def architecture_of_file(hf_config: Any) -> str:
    """The architecture of the checkpoint that a draft is a part of; SGLang has put the draft's in its place."""
    architecture: str = file_of(hf_config)["architectures"][0]
    return architecture


def file_of(hf_config: Any) -> Mapping[str, Any]:
    """The ``config.json`` that SGLang read; see :func:`file_values`."""
    return file_values(str(hf_config._name_or_path), getattr(hf_config, "_commit_hash", None))


def is_hybrid(hf_config: Any) -> bool:
    """Whether this is a Qwen3-Next or a Qwen3.5, whose layers are of two kinds."""
    return isinstance(getattr(hf_config, "text_config", hf_config), Qwen3NextConfig)


def _changed(values: Mapping[str, Any], unchanged: Mapping[str, Any], file: Mapping[str, Any]) -> dict[str, Any]:
    """The ``file``'s values, with those of ``values`` that are not what SGLang makes of the file (``unchanged``)."""
    result = dict(file)
    for key, value in values.items():
        before = unchanged.get(key)
        if value == before:
            continue
        if key.endswith("_config") and all(isinstance(each, Mapping) for each in (value, before, file.get(key))):
            result[key] = _changed(value, unchanged[key], file[key])
        else:
            result[key] = value
    return result


def _remove_added(values: dict[str, Any], file: Mapping[str, Any]) -> None:
    """Take away what SGLang adds to the configuration of a hybrid model, and to that of its text."""
    added = (*_ADDED, "v_head_dim", *_ADDED_ON_CPU, _ADDED_FOR_DRAFTS)
    parts = [(values, file)]
    if isinstance(text := values.get("text_config"), dict):
        parts.append((text, file.get("text_config") or {}))
    for part, of_file in parts:
        for key in added:
            if key not in of_file:
                part.pop(key, None)


def _undo_padding(values: dict[str, Any], file: Mapping[str, Any]) -> None:
    """Put sizes that SGLang has padded back."""
    for size, before in BEFORE_PADDING.items():
        if before in values and before not in file:
            original = values.pop(before)
            if size in values:
                values[size] = original
    text = values.get("text_config")
    if isinstance(text, dict):
        _undo_padding(text, file.get("text_config") or {})
