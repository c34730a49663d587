"""Read a Hugging Face configuration as a :class:`ModelConfig`, by the class of its family."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from atom_core.config import ModelConfig, read_architecture
from atom_core.hf_config import as_mapping
from atom_core.models.registry import load_model_class


def read_model_config(source: Mapping[str, Any] | Any) -> ModelConfig:
    """Read ``source``, a parsed ``config.json`` or a ``PretrainedConfig``.

    Raises:
        ValueError: an unsupported architecture, or a value that its family cannot run.
    """
    values = as_mapping(source)
    family = load_model_class(read_architecture(values))
    return family.read_config(family.schema.read(values))
