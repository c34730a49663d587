"""Hybrid models: what SGLang takes otherwise than their checkpoints say, put right by its own flags, or refused."""

from __future__ import annotations

import json
import logging
from typing import Any

from atom_core.config import GatedDeltaNetConfig, ModelConfig

logger = logging.getLogger("sglang.atom_plugin")

#: SGLang's only way to say which layers have full attention: every n-th.
INTERVAL = "full_attention_interval"


def hybrid_overrides(view: Any, hf_config: Any, config: ModelConfig) -> dict[str, Any]:
    """Overrides of server arguments for a hybrid model.

    SGLang sizes its pools by :data:`INTERVAL`, which files saved by Transformers 5 lack. And only the text of a model
    with images is ours.

    Args:
        view: SGLang's resolving view of the server's arguments.
        hf_config: of the model.
        config: the same as the core has read it.

    Raises:
        ValueError: SGLang cannot express which layers have full attention, or images are asked for.
    """
    overrides: dict[str, Any] = {}
    text = hf_config.get_text_config()
    full = [index for index, layer in enumerate(config.layers) if not isinstance(layer.mixer, GatedDeltaNetConfig)]
    if full != _sglangs_full_layers(text):
        interval = full[0] + 1 if full else config.num_layers + 1
        if full != list(range(interval - 1, config.num_layers, interval)):
            raise ValueError(
                f"{config.architecture} has full attention in layers {full} (layer_types of config.json). SGLang has "
                f"pools for such a model only if it is every n-th layer ({INTERVAL})."
            )
        given = json.loads(view.json_model_override_args)
        if text is hf_config:
            given[INTERVAL] = interval
        else:
            given["text_config"] = {**given.get("text_config", {}), INTERVAL: interval}
        overrides["json_model_override_args"] = json.dumps(given)
    if text is not hf_config:
        if view.enable_multimodal:
            raise ValueError(
                f"atom-plugin has only the text of {config.architecture}: leave out --enable-multimodal, or unset "
                "SGLANG_EXTERNAL_MODEL_PACKAGE."
            )
        logger.info("atom-plugin serves the text of %s: requests with images are refused", config.architecture)
        overrides["enable_multimodal"] = False
    return overrides


def _sglangs_full_layers(text: Any) -> list[int] | None:
    """The layers for which SGLang has a pool of keys and values; None if it cannot say."""
    return list(text.full_attention_layer_ids) if getattr(text, INTERVAL, None) else None
