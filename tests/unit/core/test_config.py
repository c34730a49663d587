"""Reading a Hugging Face configuration: what is missing means what it means there, what cannot be is an error."""

from __future__ import annotations

import pytest
from transformers import AutoConfig

from atom_core.models.read_config import read_model_config
from atom_core.models.registry import supported_architectures
from tests.unit.core.hugging_face import FAMILIES, make_config

BY_TYPE = {family.model_type: family for family in FAMILIES}
every_family = pytest.mark.parametrize("family", FAMILIES, ids=str)


def values_of(model_type="llama", **settings):
    """A parsed ``config.json``; None leaves a key out."""
    values = make_config(BY_TYPE[model_type]).to_dict()
    values.update(settings)
    return {key: value for key, value in values.items() if value is not None}


@every_family
def test_a_parsed_file_and_a_configuration_object_read_alike(family):
    config = make_config(family)
    assert read_model_config(config) == read_model_config(config.to_dict())


@every_family
@pytest.mark.parametrize(
    "key",
    [
        "attention_bias",
        "hidden_act",
        "head_dim",
        "layer_types",
        "max_window_layers",
        "mlp_bias",
        "rms_norm_eps",
        "rope_parameters",
        "sliding_window",
        "tie_word_embeddings",
        "use_sliding_window",
    ],
)
def test_a_missing_key_means_what_hugging_faces_class_takes_it_for(family, key):
    # (Without num_key_value_heads, which every checkpoint gives, the tensors' shapes do not fit: no quiet mistake.)
    windowed = {"use_sliding_window": True} if "use_sliding_window" in make_config(family).to_dict() else {}
    values = make_config(family, num_hidden_layers=30, **windowed)
    values = {name: value for name, value in values.to_dict().items() if name not in (key, "layer_types")}
    theirs = AutoConfig.for_model(**values)
    assert read_model_config(values) == read_model_config(theirs.to_dict())


def test_null_means_missing_where_hugging_faces_class_takes_null():
    values = values_of()
    expected = read_model_config(values_of(num_key_value_heads=4))
    assert read_model_config({**values, "num_key_value_heads": None}) == expected


def test_qwen_windows_begin_at_max_window_layers():
    config = read_model_config(
        values_of("qwen2", use_sliding_window=True, sliding_window=8, max_window_layers=2, layer_types=None)
    )
    assert [layer.mixer.window for layer in config.layers] == [None, None, 8]


def test_an_unsupported_architecture_is_told_the_supported_ones():
    supported = ", ".join(supported_architectures())
    with pytest.raises(ValueError, match=f"'BertModel' is not supported; supported: {supported}"):
        read_model_config(values_of(architectures=["BertModel"]))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"architectures": None}, "names no architecture: config.json needs an 'architectures' entry"),
        ({"architectures": []}, "names no architecture"),
        ({"num_attention_heads": 4, "num_key_value_heads": 3}, "num_attention_heads=4 is not a multiple of num_key_v"),
        ({"num_attention_heads": 4, "num_key_value_heads": 8}, "num_attention_heads=4 is not a multiple of num_key_v"),
        ({"num_attention_heads": 0}, "num_attention_heads=0; a positive integer is needed"),
        ({"num_key_value_heads": -2}, "num_key_value_heads=-2; a positive integer is needed"),
        ({"num_hidden_layers": 2.5}, "num_hidden_layers=2.5; a positive integer is needed"),
        ({"hidden_size": "96"}, "hidden_size='96'; a positive integer is needed"),
        ({"vocab_size": True}, "vocab_size=True; a positive integer is needed"),
        ({"hidden_size": 97, "head_dim": None}, "hidden_size=97 does not divide by num_attention_heads=4"),
        ({"head_dim": 0}, "head_dim=0; a positive integer is needed"),
        ({"head_dim": 21}, "rotates 21 elements per head; rope needs an even count"),
        ({"hidden_act": "relu6"}, "hidden_act='relu6' is not supported; supported: gelu, gelu_new, .*silu"),
        *(
            ({key: None}, f"no '{key}', which its architecture needs")
            for key in ("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers", "vocab_size")
        ),
    ],
    ids=str,
)
def test_impossible_values_are_errors_that_name_them(settings, message):
    with pytest.raises(ValueError, match=message):
        read_model_config(values_of(**settings))


@pytest.mark.parametrize("model_type", ["qwen2", "qwen3"])
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"layer_types": ["full_attention", "chunked_attention", "full_attention"]}, r"\['chunked_attention'\]; sup"),
        ({"layer_types": ["full_attention"]}, "layer_types names 1 layers, num_hidden_layers=3"),
    ],
    ids=str,
)
def test_impossible_layer_types_are_errors_that_name_them(model_type, settings, message):
    with pytest.raises(ValueError, match=message):
        read_model_config(values_of(model_type, **settings))


@pytest.mark.parametrize("window", [0, -1, "wide"])
@pytest.mark.parametrize("model_type", ["mistral", "qwen2", "qwen3"])
def test_a_window_is_a_positive_number_of_tokens(model_type, window):
    with pytest.raises(ValueError, match=f"sliding_window={window!r}; a positive integer is needed"):
        read_model_config(values_of(model_type, use_sliding_window=True, sliding_window=window))
