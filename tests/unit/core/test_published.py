"""Published configurations of supported families and their fine-tunes: what serves is read, as Transformers reads it.

One file a family under ``published/``, one configuration a line, with where it was read. "published config.json" alone
names a page of the model hub. Lists of modules in a ``quantization_config`` are cut to a few entries.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from atom_core.config import GatedDeltaNetConfig, ModelConfig
from atom_core.models.read_config import read_model_config
from atom_core.models.registry import supported_architectures
from atom_core.quant import QuantConfig, read_quantization
from atom_core.rope import inverse_frequencies

DIRECTORY = Path(__file__).parent / "published"
ENTRIES: list[dict[str, Any]] = [
    json.loads(line)
    for path in sorted(DIRECTORY.glob("*.jsonl"))
    for line in path.read_text(encoding="utf-8").splitlines()
]
SERVE = [entry for entry in ENTRIES if entry["serves"]]
#: Of what does not serve, "not_yet" marks what is not refused yet.
REFUSED = [entry for entry in ENTRIES if not entry["serves"] and not entry.get("not_yet", False)]
#: Model types that only code of their own on the hub knows, and the class that this code is a copy of.
COPIES = {"kimi_k2": "deepseek_v3"}


def name_of(entry: dict[str, Any]) -> str:
    return str(entry["name"])


serving = pytest.mark.parametrize("entry", SERVE, ids=name_of)


def read(config: dict[str, Any]) -> tuple[ModelConfig, QuantConfig]:
    """All that is read of a parsed ``config.json``."""
    return read_model_config(config), read_quantization(config)


def theirs_of(config: dict[str, Any]) -> Any:
    """Transformers' own configuration, made from the same keys."""
    kind = config["model_type"]
    return AutoConfig.for_model(COPIES.get(kind, kind), **{k: v for k, v in config.items() if k != "model_type"})


def text_of(config: dict[str, Any]) -> Any:
    """That of the language model."""
    return theirs_of(config).get_text_config()


def test_the_fixture_has_every_family():
    assert len(SERVE) >= 60
    assert {entry["config"]["architectures"][0] for entry in SERVE} == set(supported_architectures())
    assert len({entry["name"] for entry in ENTRIES}) == len(ENTRIES)
    for entry in ENTRIES:
        assert entry["serves"] != ("why" in entry), entry["name"]


@serving
def test_what_serves_is_read(entry):
    read(entry["config"])


@serving
def test_what_transformers_would_save_of_it_is_read_alike(entry):
    saved = json.loads(theirs_of(entry["config"]).to_json_string())
    assert read(saved) == read(entry["config"])


@pytest.mark.parametrize("entry", REFUSED, ids=name_of)
def test_what_does_not_serve_is_refused(entry):
    with pytest.raises(ValueError, match="not supported"):
        read(entry["config"])


@serving
def test_sizes_are_transformers_own(entry):
    ours, theirs = read_model_config(entry["config"]), text_of(entry["config"])
    mixer = next(it.mixer for it in ours.layers if not isinstance(it.mixer, GatedDeltaNetConfig))
    found = {
        "vocab_size": ours.vocab_size,
        "hidden_size": ours.hidden_size,
        "intermediate_size": ours.intermediate_size,
        "num_hidden_layers": ours.num_layers,
        "num_attention_heads": mixer.num_heads,
        "num_key_value_heads": mixer.num_kv_heads,
        "max_position_embeddings": ours.max_position,
        "rms_norm_eps": ours.rms_norm_eps,
        "tie_word_embeddings": ours.tie_word_embeddings,
    }
    if not hasattr(theirs, "intermediate_size"):  # no layer is dense
        assert not ours.has_dense_layers
        del found["intermediate_size"]
    assert found == {key: getattr(theirs, key) for key in found}
    for linear in (it.mixer for it in ours.layers if isinstance(it.mixer, GatedDeltaNetConfig)):
        heads = linear.num_key_heads, linear.num_value_heads, linear.conv_width
        assert heads == (theirs.linear_num_key_heads, theirs.linear_num_value_heads, theirs.linear_conv_kernel_dim)
        assert (linear.key_dim, linear.value_dim) == (theirs.linear_key_head_dim, theirs.linear_value_head_dim)
    if not ours.has_mla:
        head_dim = getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads
    else:
        head_dim = theirs.qk_head_dim
        assert (mixer.rank, mixer.query_rank) == (theirs.kv_lora_rank, theirs.q_lora_rank)
        assert (mixer.rope_dim, mixer.value_dim) == (theirs.qk_rope_head_dim, theirs.v_head_dim)
    assert mixer.query_dim == head_dim


@serving
def test_rotations_are_transformers_own(entry):
    ours, theirs = read_model_config(entry["config"]), text_of(entry["config"])
    parameters = theirs.rope_parameters
    assert (ours.rope.rope_type, ours.rope.theta) == (parameters["rope_type"], parameters["rope_theta"])
    if ours.rope.rope_type == "default":
        return
    frequencies, scaling = ROPE_INIT_FUNCTIONS[ours.rope.rope_type](theirs, torch.device("cpu"))
    torch.testing.assert_close(inverse_frequencies(ours.rope, ours.max_position), frequencies)
    assert ours.rope.attention_factor == pytest.approx(scaling)


@serving
def test_windows_are_transformers_own(entry):
    ours, theirs = read_model_config(entry["config"]), text_of(entry["config"])
    window = getattr(theirs, "sliding_window", None)
    types = getattr(theirs, "layer_types", None) or ["sliding_attention"] * theirs.num_hidden_layers
    assert [layer.mixer.window for layer in ours.layers] == [
        window if kind == "sliding_attention" else None for kind in types
    ]


@serving
def test_experts_are_transformers_own(entry):
    ours, theirs = read_model_config(entry["config"]), text_of(entry["config"])
    experts = next(
        (
            getattr(theirs, key)
            for key in ("n_routed_experts", "num_local_experts", "num_experts")
            if hasattr(theirs, key)
        ),
        None,
    )
    if experts is None:
        assert not ours.has_mixtures
        return
    dense = getattr(theirs, "first_k_dense_replace", 0)
    assert [layer.moe is None for layer in ours.layers] == [index < dense for index in range(ours.num_layers)]
    moe = ours.layers[-1].moe
    assert moe is not None
    assert (moe.routing.num_experts, moe.routing.top_k) == (experts, theirs.num_experts_per_tok)
    assert moe.intermediate_size == (getattr(theirs, "moe_intermediate_size", None) or theirs.intermediate_size)
    shared = getattr(theirs, "n_shared_experts", 0) * moe.intermediate_size
    assert moe.shared_size == getattr(theirs, "shared_expert_intermediate_size", shared)
    assert moe.routing.scale == getattr(theirs, "routed_scaling_factor", 1.0)
    if moe.routing.num_groups > 1:
        assert (moe.routing.num_groups, moe.routing.top_groups) == (theirs.n_group, theirs.topk_group)
