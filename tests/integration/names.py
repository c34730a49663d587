"""Names of parameters and modules: models to compare ours and the frameworks' own by, and in what they may differ."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tests.integration.questions import checkpoint
from tests.unit.core.hugging_face import make_config
from tests.unit.core.models.test_mixtral import FAMILY as MIXTRAL

#: Trained checkpoints, and values of their configurations without which a framework's own model is not built on a CPU.
MODELS: Mapping[str, Mapping[str, Any]] = {
    "llama": {},
    "mistral": {},
    "qwen2": {},
    "qwen3": {},
    "qwen3_moe": {"mlp_only_layers": []},
    "mixtral": {"head_dim": 24, "vocab_size": 128},
    "gpt_oss": {},
    "glm4_moe": {},
    "deepseek_v2": {"n_group": 1, "topk_group": 1},
    "deepseek_v3": {
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 128,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        }
    },
}
#: Stacked experts: vLLM and SGLang say w13_weight and w2_weight, in places that differ by version. Ours are called as
#: GPT-OSS's checkpoints and Transformers call them: gate_up_proj and down_proj.
_STACKED = re.compile(r"\.experts\.[^0-9].*$")
#: Of attention over latents, vLLM and SGLang have one product under different names; ours is SGLang's. Where queries
#: are not compressed, theirs are two and ours is one.
_FUSED = re.compile(r"\.(fused_qkv_a_proj(_with_mqa)?|q_proj|kv_a_proj_with_mqa)\b")
#: GPT-OSS: vLLM shortens what checkpoints call "self_attn" and "embed_tokens"; ours does not.
_SHORTENED = (
    (re.compile(r"^(model\.layers\.\d+)\.attn\b"), r"\1.self_attn"),
    (re.compile("^model.embedding"), "model.embed_tokens"),
)


def make(folder: Path, model: str) -> Path:
    """The folder of a model, which has a configuration alone."""
    place = folder / model
    place.mkdir()
    if model == "mixtral":
        make_config(MIXTRAL).save_pretrained(place)
        values = json.loads((place / "config.json").read_text())
    else:
        values = json.loads(Path(checkpoint(model), "config.json").read_text())
    (place / "config.json").write_text(json.dumps({**values, **MODELS[model]}))
    return place


def comparable(names: Iterable[str]) -> set[str]:
    """``names`` without what may differ."""
    found = set()
    for name in names:
        name = _FUSED.sub(".fused_qkv_a_proj", _STACKED.sub(".experts", name))
        for pattern, whole in _SHORTENED:
            name = pattern.sub(whole, name)
        found.add(name)
    return found
