"""The language model inside a multimodal checkpoint: its configuration, and the names of its modules there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

#: What names begin with there, as vLLM, SGLang and Transformers write it, and what they begin with by themselves.
PREFIXES = (("model.language_model.", "model."), ("language_model.", ""))
#: The key that counts there, whatever the language model's own says: head and embedding are of the whole model.
TIED = "tie_word_embeddings"
#: Keys of the whole configuration that the language model takes where its own has none.
_TAKEN = ("quantization_config", "compression_config")
#: All that it reads of the whole configuration.
OF_WHOLE = ("architectures", "model_type", TIED, *_TAKEN)


def of_text(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """The language model's values of a multimodal configuration, which has them in ``text_config``; else ``values``.

    Raises:
        ValueError: ``text_config`` is neither an object nor one of Transformers' configurations.
    """
    inner = values.get("text_config")
    if inner is None:
        return values
    if not isinstance(inner, Mapping):
        if not hasattr(inner, "to_dict"):
            raise ValueError(f"The model's config has text_config={repr(inner)[:80]}; an object is needed.")
        inner = inner.to_dict()
    shared = {key: values[key] for key in _TAKEN if values.get(key) is not None and inner.get(key) is None}
    tied = {} if values.get(TIED) is None else {TIED: values[TIED]}
    return {**inner, **shared, **tied, "architectures": values.get("architectures")}


def alone(name: str) -> str:
    """The name by itself of what a multimodal checkpoint calls ``name``."""
    for prefix, instead in PREFIXES:
        if name.startswith(prefix):
            return instead + name.removeprefix(prefix)
    return name


def spellings(module: str) -> tuple[str, ...]:
    """``module``, and its names in multimodal checkpoints."""
    return (module, *(prefix + module.removeprefix(ours) for prefix, ours in PREFIXES if module.startswith(ours)))
