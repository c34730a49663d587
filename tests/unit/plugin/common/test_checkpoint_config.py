"""What our models read of a framework's configuration, beside the file that it was made of."""

from __future__ import annotations

import json
import logging

import pytest
from transformers import Qwen3Config

from atom_core.models.read_config import read_model_config
from atom_plugin.common.checkpoint_config import config_values, file_values

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
OLD = {"rope_theta": 1000000.0, "rope_scaling": None}
NEW = {"rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0}}
SIZES = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}


def overridden(file, **override):
    """A configuration object as vLLM and SGLang override it: the dictionary is replaced as a whole."""
    config = Qwen3Config(**file)
    config.update(override)
    return config


@pytest.mark.parametrize("file", [OLD, NEW], ids=["old form", "new form"])
@pytest.mark.parametrize("key", ["rope_parameters", "rope_scaling"])
def test_a_stretched_rope_keeps_the_checkpoints_own_base(file, key, caplog):
    file = {**SIZES, **file}
    with caplog.at_level(logging.INFO, logger="atom_plugin"):
        values = config_values(overridden(file, **{key: dict(YARN)}), file, "Qwen3ForCausalLM")
    rope = read_model_config(values).rope
    assert (rope.rope_type, rope.factor, rope.theta) == ("yarn", 4.0, 1000000.0)
    (record,) = caplog.records
    assert record.getMessage().startswith("rope_theta=1000000.0 is taken from the checkpoint")


@pytest.mark.parametrize("file", [OLD, NEW], ids=["old form", "new form"])
def test_a_base_that_a_framework_notes_as_null_is_none(file):
    """vLLM 0.30 does so with Transformers 5.24, where ``rope_scaling`` is overridden."""
    file = {**SIZES, **file}
    of_framework = overridden(file).to_dict() | {"rope_parameters": {**YARN, "rope_theta": None}}
    rope = read_model_config(config_values(of_framework, file, "Qwen3ForCausalLM")).rope
    assert (rope.rope_type, rope.theta) == ("yarn", 1000000.0)


def test_a_base_that_is_asked_for_counts(caplog):
    file = {**SIZES, **OLD}
    values = config_values(overridden(file, rope_parameters={**YARN, "rope_theta": 5e6}), file, "Qwen3ForCausalLM")
    assert read_model_config(values).rope.theta == 5e6
    assert caplog.records == []


def test_without_a_base_anywhere_it_is_the_familys():
    values = config_values(overridden(SIZES, rope_parameters=dict(YARN)), {}, "Qwen3ForCausalLM")
    assert read_model_config(values).rope.theta == 10000.0
    values = {**values, "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "layer_types": None}
    values = {key: values[key] for key in values if key != "max_window_layers"}
    assert read_model_config(config_values(values, {})).rope.theta == 1000000.0


def test_what_a_framework_writes_into_every_configuration_is_left_out_unless_the_file_has_it():
    values = {"swa_head_dim": 64, "hidden_size": 64}
    assert config_values(values, {}, None, ("swa_head_dim",)) == {"hidden_size": 64}
    assert config_values(values, {"swa_head_dim": 32}, None, ("swa_head_dim",)) == values


def test_fewer_layers_than_the_file_has_are_its_first():
    """An override replaces the count, and the kinds of all layers stay."""
    kinds = ["full_attention", "sliding_attention", "full_attention"]
    file = {"num_hidden_layers": 3, "layer_types": kinds}
    assert config_values({"num_hidden_layers": 2, "layer_types": kinds}, file)["layer_types"] == kinds[:2]
    # Whoever names kinds, or has a file of another count, is left alone.
    for values, of_file in (({"num_hidden_layers": 2, "layer_types": kinds[:1]}, file), (file, file), (file, {})):
        assert config_values(values, of_file) == values


def test_the_file_of_a_folder_and_of_nothing(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(OLD))
    assert file_values(str(tmp_path)) == OLD
    assert file_values(str(tmp_path / "absent")) == {}
    assert file_values("organisation/model-that-no-cache-has") == {}
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(ValueError, match="holds a list, not a JSON object"):
        file_values(str(tmp_path))
