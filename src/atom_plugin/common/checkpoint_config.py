"""A framework's configuration object beside the ``config.json`` that it was made of.

What a framework hands over is not what stands in the file: overrides replace whole dictionaries in it, and the
framework writes values of its own into it.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from typing import Any

from atom_core.checkpoint import has_own_head, read_config_json
from atom_core.hf_config import as_mapping
from atom_plugin.common.hub import cached_folder, whole_folder

logger = logging.getLogger(__name__)

#: What a rope dictionary has beside its kind of stretching: an override that replaces the dictionary means to keep it.
_KEPT_OF_ROPE = ("rope_theta", "partial_rotary_factor")


def file_values(model: str, revision: str | None = None) -> Mapping[str, Any]:
    """What ``config.json`` of a model says: of a folder, or of a name that Hugging Face's cache has; else nothing.

    Raises:
        ValueError: the file is not a JSON object.
    """
    folder = cached_folder(model, revision)
    return {} if folder is None or not (folder / "config.json").is_file() else read_config_json(folder)


def config_values(
    hf_config: Any, file: Mapping[str, Any], architecture: str | None = None, added: Collection[str] = ()
) -> dict[str, Any]:
    """The values of a framework's configuration object, for :func:`atom_core.models.read_config.read_model_config`.

    Args:
        hf_config: the object, or its values.
        file: see :func:`file_values`.
        architecture: in place of the one that the framework has put there; None: that one.
        added: keys that the framework writes into every configuration; one that the file has too is the file's.
    """
    values = {key: value for key, value in as_mapping(hf_config).items() if key not in added or key in file}
    if architecture is not None:
        values["architectures"] = [architecture]
    return _with_rope_of_file(_of_first_layers(values, file), file)


def _of_first_layers(values: dict[str, Any], file: Mapping[str, Any]) -> dict[str, Any]:
    """``values`` with the file's kinds of the first layers alone, where an override asks for fewer layers."""
    count, types = values.get("num_hidden_layers"), values.get("layer_types")
    if not isinstance(count, int) or not isinstance(types, list) or len(types) != file.get("num_hidden_layers"):
        return values
    return {**values, "layer_types": types[:count]} if 0 < count < len(types) else values


def untied(values: dict[str, Any], model: str, revision: str | None = None, cache: str | None = None) -> dict[str, Any]:
    """``values`` without a tied head where the files of a model have another one; see ``config_of`` of the core."""
    if values.get("tie_word_embeddings"):
        folder = whole_folder(model, revision, cache)
        if folder is not None and has_own_head(folder):
            return {**values, "tie_word_embeddings": False}
    return values


def _with_rope_of_file(values: dict[str, Any], file: Mapping[str, Any]) -> dict[str, Any]:
    """``values`` with the rope base of the file, where an override has replaced the dictionary that had it.

    ``--hf-overrides '{"rope_parameters": {"rope_type": "yarn", ...}}'``, the official way to stretch Qwen's context,
    leaves no base, and no base means another one.
    """
    name = "rope_scaling" if values.get("rope_scaling") else "rope_parameters"
    rope = values.get(name)
    if not isinstance(rope, Mapping) or not rope:
        return values
    of_file = {**file, **(file.get("rope_scaling") or {}), **(file.get("rope_parameters") or {})}
    for key in _KEPT_OF_ROPE:
        value = of_file.get(key)
        if value is None or rope.get(key) is not None or values.get(key) is not None:
            continue
        # A framework may have noted the base that an override lacks as null.
        values[name] = {k: v for k, v in values[name].items() if k != key}
        values[key] = value
        logger.info("%s=%s is the checkpoint's own: the rope that was asked for has none", key, value)
    return values
