"""The doctor on commands that change a checkpoint's configuration."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from atom_plugin.doctor import framework as frameworks
from atom_plugin.doctor.checkpoint import check_checkpoint, read_model
from atom_plugin.doctor.command import parse_command
from atom_plugin.doctor.overrides import overridden, overrides_of

DENSE = Path(__file__).parents[3] / "checkpoints" / "qwen3_5"
VLLM, SGLANG = "vllm serve M --hf-overrides", "sglang serve M --json-model-override-args"


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (f"{VLLM} {{}}", {}),
        (f"{VLLM} {{", {}),
        (f"{VLLM} []", {}),
        ("vllm serve M", {}),
        ('sglang serve M --hf-overrides {"a":1}', {}),
        (f'{VLLM} {{"num_hidden_layers":2}}', {"num_hidden_layers": 2}),
        (f'{SGLANG} {{"num_hidden_layers":2}}', {"num_hidden_layers": 2}),
        (
            f"{VLLM}.num_hidden_layers 2 --hf-overrides.mamba_ssm_dtype float32",
            {"num_hidden_layers": 2, "mamba_ssm_dtype": "float32"},
        ),
        (f'{VLLM} {{"head_dtype":"float32","dtype":"float16"}}', {}),
        (f'{SGLANG} {{"enable_lm_head_fp32":true}}', {}),
        (f"{VLLM}.text_config.num_hidden_layers=2", {"text_config": {"num_hidden_layers": 2}}),
    ],
)
def test_what_a_command_changes(command, expected):
    assert overrides_of(parse_command(command.split())) == expected


@pytest.mark.parametrize("server", [VLLM, SGLANG])
def test_the_configuration_counts_as_it_is_changed(server):
    for count, problem in ((2, "layer_types has no 'full_attention'"), (0, "num_hidden_layers"), (4, None)):
        command = parse_command([*server.split(), f'{{"num_hidden_layers":{count}}}'])
        found = list(check_checkpoint(DENSE, framework=command.framework, overrides=overrides_of(command)))
        assert [problem in finding.problem for finding in found] == [True] * (problem is not None)
        assert (read_model(DENSE, command) is None) == (problem is not None)


@pytest.mark.parametrize("framework", [frameworks.VLLM, frameworks.SGLANG])
def test_parts_keep_their_other_keys_and_rope_its_base(framework):
    values = {"text_config": {"a": 1, "b": 2}, "rope_parameters": {"rope_theta": 5.0}}
    assert overridden(values, {}, DENSE, framework) == values
    changed = overridden(values, {"text_config": {"b": 3}, "c": 4}, DENSE, framework)
    assert changed["text_config"] == {"a": 1, "b": 3}
    assert changed["c"] == 4
    rope = {"rope_type": "yarn", "factor": 4.0}
    changed = overridden(values, {"rope_parameters": rope}, DENSE, frameworks.VLLM)
    assert changed["rope_parameters"] == rope
    assert changed["rope_theta"] == json.loads((DENSE / "config.json").read_text())["rope_parameters"]["rope_theta"]


def test_a_key_of_the_language_model_outside_text_config_is_found(tmp_path):
    text = json.loads((DENSE / "config.json").read_text())
    whole = {"architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5", "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    command = parse_command([*VLLM.split(), '{"rope_scaling":{"rope_type":"yarn"}}'])
    (finding,) = check_checkpoint(tmp_path, framework=command.framework, overrides=overrides_of(command))
    assert "--hf-overrides gives rope_scaling outside text_config" in finding.problem
    assert 'Write {"text_config": {"rope_scaling": {"rope_type": "yarn"}}}' in finding.problem


def test_objects_are_merged_where_the_framework_does():
    """vLLM merges below a configuration within, SGLang rope at the top; each replaces the others."""
    before = {"rope_type": "yarn", "factor": 4.0}
    values = {"rope_scaling": before, "text_config": {"rope_scaling": before}, "quantization_config": {"a": 1}}
    change = {"beta_fast": 16}
    both = {**before, **change}
    for framework, outer, inner in ((frameworks.VLLM, change, both), (frameworks.SGLANG, both, change)):
        changes = {"rope_scaling": change, "text_config": {"rope_scaling": change}, "quantization_config": {"b": 2}}
        changed = overridden(values, changes, Path("nowhere"), framework)
        assert changed["rope_scaling"] == outer
        assert changed["text_config"]["rope_scaling"] == inner
        assert changed["quantization_config"] == {"b": 2}


def test_a_dotted_override_of_what_is_no_object():
    command = f'{VLLM} {{"rope_parameters":null}} --hf-overrides.rope_parameters.rope_type yarn'
    assert overrides_of(parse_command(command.split())) == {"rope_parameters": {"rope_type": "yarn"}}
