"""What our models read of SGLang's configuration of a model: its values, with what overrides took away."""

from __future__ import annotations

from typing import Any

from atom_plugin.common.checkpoint_config import config_values, file_values, untied
from atom_plugin.sglang.padding import BEFORE_PADDING

#: A key by which a configuration asks for a head in float32, as ``--enable-fp32-lm-head`` does; SGLang's alone.
FLOAT32_HEAD = "enable_lm_head_fp32"
#: What SGLang's ``ModelConfig`` writes into every configuration.
_ADDED = ("context_len", "encoder_only", "language_only", "language_model_only", "swa_head_dim", "swa_v_head_dim")


def values_of(hf_config: Any, architecture: str | None = None) -> dict[str, Any]:
    """The configuration of a model, of ``architecture`` where SGLang has put another name; sizes are not padded."""
    values = {key: value for key, value in hf_config.to_dict().items() if key != FLOAT32_HEAD}
    model = str(getattr(hf_config, "_name_or_path", ""))
    revision = getattr(hf_config, "_commit_hash", None)
    file = file_values(model, revision)
    for size, before in BEFORE_PADDING.items():
        if before in values and before not in file:
            original = values.pop(before)
            if size in values:
                values[size] = original
    # Of models whose values are as wide as their keys SGLang writes it too.
    added = (*_ADDED, "v_head_dim") if values.get("v_head_dim") == values.get("head_dim") else _ADDED
    return untied(config_values(values, file, architecture, added), model, revision)
