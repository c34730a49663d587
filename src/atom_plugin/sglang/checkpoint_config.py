"""The config values of a checkpoint, read from SGLang's configuration; values that overrides removed are restored."""

from __future__ import annotations

from typing import Any

from atom_plugin.common.checkpoint_config import config_values, file_values, untied
from atom_plugin.sglang.padding import BEFORE_PADDING

#: SGLang's own key for a head in float32, like ``--enable-fp32-lm-head``.
FLOAT32_HEAD = "enable_lm_head_fp32"
#: Keys that SGLang's ``ModelConfig`` adds to every config.
_ADDED = ("context_len", "encoder_only", "language_only", "language_model_only", "swa_head_dim", "swa_v_head_dim")


def values_of(hf_config: Any, architecture: str | None = None) -> dict[str, Any]:
    """The config values of a model, without padding, with ``architecture`` if SGLang has replaced it."""
    values = {key: value for key, value in hf_config.to_dict().items() if key != FLOAT32_HEAD}
    model = str(getattr(hf_config, "_name_or_path", ""))
    revision = getattr(hf_config, "_commit_hash", None)
    file = file_values(model, revision)
    for size, before in BEFORE_PADDING.items():
        if before in values and before not in file:
            original = values.pop(before)
            if size in values:
                values[size] = original
    # SGLang also adds v_head_dim if it equals head_dim.
    added = (*_ADDED, "v_head_dim") if values.get("v_head_dim") == values.get("head_dim") else _ADDED
    return untied(config_values(values, file, architecture, added), model, revision)
