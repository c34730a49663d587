"""Reading a framework's configuration object together with the ``config.json`` that it was made from.

The two differ: overrides replace whole dictionaries, and the framework adds its own values.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Mapping
from typing import Any

from atom_core.checkpoint import has_untied_head, read_config_json
from atom_core.hf_config import as_mapping
from atom_core.language_model import OF_WHOLE, TIED, of_text
from atom_core.models.registry import load_model_class
from atom_plugin.common.hub import cached_folder, whole_folder

logger = logging.getLogger(__name__)

#: All keys that say how positions are rotated.
ROPE_KEYS = (
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "partial_rotary_factor",
    "max_position_embeddings",
    "original_max_position_embeddings",
)
#: Keys of a rope dictionary that an override of the scaling should not drop.
_RESTORED_ROPE_KEYS = ("rope_theta", "partial_rotary_factor")


def file_values(model: str, revision: str | None = None) -> Mapping[str, Any]:
    """The ``config.json`` of a folder, or of a name in Hugging Face's cache; empty if there is none.

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
        architecture: replaces the framework's value, unless None.
        added: keys that the framework adds to every configuration, removed unless the file has them.
    """
    values = {key: value for key, value in as_mapping(hf_config).items() if key not in added or key in file}
    if architecture is not None:
        values["architectures"] = [architecture]
    of_file = of_text(file)
    if isinstance(text := values.get("text_config"), Mapping):
        values["text_config"] = _with_rope_of_file(_of_first_layers(dict(text), of_file), of_file)
    return _with_rope_of_file(_of_first_layers(values, of_file), of_file)


def check_overrides(setting: str, overrides: Mapping[str, Any], file: Mapping[str, Any], architecture: str) -> None:
    """Refuse keys of the language model outside ``text_config``, where none is read, of a multimodal checkpoint.

    Args:
        setting: which gives the overrides.
        overrides: by the key of ``config.json``.
        file: see :func:`file_values`.
        architecture: the checkpoint's.

    Raises:
        ValueError: there is one.
    """
    if not isinstance(file.get("text_config"), Mapping):
        return
    known = load_model_class(architecture).schema.model_fields
    # A key that the file has there, too, is of the whole model.
    if outside := [key for key in overrides if key in known and key not in file and key not in OF_WHOLE]:
        inside = json.dumps({"text_config": {key: overrides[key] for key in outside}})
        raise ValueError(
            f"{setting} gives {', '.join(outside)} outside text_config, where {architecture} has the keys of its "
            f"language model: it would have no effect. Write {inside}."
        )


def _of_first_layers(values: dict[str, Any], file: Mapping[str, Any]) -> dict[str, Any]:
    """``values`` with ``layer_types`` cut to the number of layers, if an override asks for fewer layers."""
    count, types = values.get("num_hidden_layers"), values.get("layer_types")
    if not isinstance(count, int) or not isinstance(types, list) or len(types) != file.get("num_hidden_layers"):
        return values
    return {**values, "layer_types": types[:count]} if 0 < count < len(types) else values


def untied(values: dict[str, Any], model: str, revision: str | None = None, cache: str | None = None) -> dict[str, Any]:
    """``values`` with an untied head if the weight files have a separate one; see ``config_of`` of the core."""
    if of_text(values).get(TIED):
        folder = whole_folder(model, revision, cache)
        if folder is not None and has_untied_head(folder):
            return {**values, TIED: False}
    return values


def _with_rope_of_file(values: dict[str, Any], file: Mapping[str, Any]) -> dict[str, Any]:
    """``values`` with the file's rope base, if an override has replaced the dictionary that had it.

    ``--hf-overrides '{"rope_parameters": {"rope_type": "yarn", ...}}'``, the official way to extend Qwen's context,
    drops the base, and the default base is another.
    """
    name = "rope_scaling" if values.get("rope_scaling") else "rope_parameters"
    rope = values.get(name)
    if not isinstance(rope, Mapping) or not rope:
        return values
    of_file = {**file, **(file.get("rope_scaling") or {}), **(file.get("rope_parameters") or {})}
    for key in _RESTORED_ROPE_KEYS:
        value = of_file.get(key)
        if value is None or rope.get(key) is not None or values.get(key) is not None:
            continue
        # A framework may have set a missing base to null.
        values[name] = {k: v for k, v in values[name].items() if k != key}
        values[key] = value
        logger.info("%s=%s is taken from the checkpoint, because the rope override has none", key, value)
    return values
