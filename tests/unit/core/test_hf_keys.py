"""Every key of a configuration is read, harmless, at a value that asks for nothing, refused, or named in a warning."""

from __future__ import annotations

import dataclasses
import importlib.util
import logging
import sysconfig
from pathlib import Path

import pytest

from atom_core.hf_keys import HARMLESS, meaningful
from atom_core.models.read_config import read_model_config
from atom_core.models.registry import MODELS, load_model_class
from tests.unit.core.hugging_face import FAMILIES, make_config

ROOT = Path(__file__).parents[3]
every_family = pytest.mark.parametrize("family", FAMILIES, ids=str)


def values_of(family, **settings):
    return {**make_config(family).to_dict(), **settings}


def config_keys():
    specification = importlib.util.spec_from_file_location("config_keys", ROOT / "tools" / "config_keys.py")
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def test_all_keys_of_the_installed_classes_are_known():
    """Where this fails, a new release has keys of which none of the tables says what they mean here."""
    missing = config_keys().missing_keys(Path(sysconfig.get_path("purelib")))
    assert missing == [], "run tools/config_keys.py over the supported versions, and read what is new"


@every_family
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("dual_chunk_attention_config", {"chunk_size": 262144}),
        ("llama_4_scaling", {"beta": 0.1}),
        ("attn_logit_softcapping", 50.0),
        ("final_logit_softcapping", 30.0),
        ("embedding_multiplier", 12.0),
        ("residual_multiplier", 0.22),
        ("logits_scaling", 8.0),
        ("logit_scale", 0.0625),
        ("attention_multiplier", 0.0078125),
        ("no_rope_layers", [1, 1, 1, 0]),
        ("attention_chunk_size", 8192),
        ("qk_layernorm", True),
        ("clip_qkv", 8.0),
        ("num_kv_shared_layers", 2),
        ("sliding_window_pattern", 2),
    ],
)
def test_a_key_that_means_something_elsewhere_is_refused_by_name(family, key, value):
    with pytest.raises(ValueError, match=rf"^The model's config has {key}=.*, to which {family.architecture} gives"):
        read_model_config(values_of(family, **{key: value}))


@every_family
def test_what_is_neutral_is_taken(family):
    nothing = {
        "dual_chunk_attention_config": None,
        "attn_logit_softcapping": None,
        "qk_layernorm": False,
        "layer_scale": [],
        "embedding_multiplier": 1.0,
        "shared_expert_intermediate_size": 0,
        "attention_dropout": 0.1,
        "pad_token_id": -1,
        "unsloth_version": "2024.9",
        "task_specific_params": {"a": 1},
    }
    assert read_model_config(values_of(family, **nothing)) == read_model_config(values_of(family))


def test_what_nobody_knows_is_one_warning(caplog):
    with caplog.at_level(logging.WARNING, logger="atom_core"):
        read_model_config(values_of(FAMILIES[0], my_tools_note="x", another_note=[1]))
    (record,) = caplog.records
    assert record.getMessage() == (
        "Keys of config.json that no model reads are ignored: another_note=[1], my_tools_note='x'"
    )


def test_no_key_is_both_harmless_and_read_or_meaningful():
    assert not HARMLESS.keys() & meaningful()
    for architecture in MODELS:
        assert not HARMLESS.keys() & load_model_class(architecture).schema.model_fields.keys()


@pytest.mark.parametrize("architecture", MODELS)
def test_defaults_are_those_of_hugging_faces_class(architecture):
    from transformers import CONFIG_MAPPING

    schema = load_model_class(architecture).schema
    theirs = {field.name: field.default for field in dataclasses.fields(CONFIG_MAPPING[schema.model_types[0]])}
    for key, field in schema.model_fields.items():
        if field.default is not None and not field.is_required() and key in theirs:
            assert field.default == theirs[key], key


@pytest.mark.parametrize(
    ("architecture", "model_type"),
    [
        ("Qwen3ForCausalLM", "granite"),
        ("Qwen3ForCausalLM", "cohere"),
        ("Qwen2ForCausalLM", "llama"),
        ("MistralForCausalLM", "qwen3"),
        ("LlamaForCausalLM", "smollm3"),
        ("Glm4MoeForCausalLM", "gpt_oss"),
    ],
)
def test_two_names_of_different_models_are_refused(architecture, model_type):
    with pytest.raises(
        ValueError, match=rf"architectures=\['{architecture}'\] and model_type='{model_type}', which are"
    ):
        read_model_config(
            {
                "vocab_size": 8,
                "hidden_size": 8,
                "intermediate_size": 8,
                "num_hidden_layers": 1,
                "num_attention_heads": 1,
                "max_position_embeddings": 8,
                "architectures": [architecture],
                "model_type": model_type,
            }
        )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"hidden_act": ["silu"]}, r"hidden_act=\['silu'\]; a text is needed"),
        ({"rms_norm_eps": [1e-6]}, r"rms_norm_eps=\[1e-06\]; a number is needed"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps=nan; a .*number is needed"),
        ({"rope_parameters": "yarn"}, "rope_parameters='yarn'; an object is needed"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings='false'; true or false is needed"),
        ({"attention_bias": None}, "attention_bias=None; true or false is needed"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers=1000000000; a number of at most 1024 is needed"),
        ({"max_position_embeddings": float("inf")}, "max_position_embeddings=inf; a positive integer is needed"),
        ({"architectures": "LlamaForCausalLM"}, "architectures='LlamaForCausalLM'; a list of names is needed"),
    ],
    ids=str,
)
def test_values_of_another_type_are_one_line(settings, message):
    with pytest.raises(ValueError, match=message) as error:
        read_model_config(values_of(FAMILIES[0], **settings))
    assert "\n" not in str(error.value)
