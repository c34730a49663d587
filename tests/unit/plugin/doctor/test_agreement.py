"""`atom-plugin check MODEL`: the table, the verdict and the exit code."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from atom_plugin.cli import app
from tests.hybrid_checkpoints import make_hybrid
from tests.unit.core.test_spellings import fused, respell
from tests.unit.plugin.installed import run_cli

CHECKPOINTS = Path(__file__).parents[3] / "checkpoints"


@pytest.fixture
def checkpoint(tiny_checkpoint, tmp_path):
    """A copy that a test may damage."""
    return shutil.copytree(tiny_checkpoint, tmp_path / "model")


def test_a_model_that_agrees_is_tabled_stage_by_stage_and_exits_0(checkpoint):
    result = run_cli("check", str(checkpoint))
    assert result.returncode == 0, result.stderr
    for stage in ("the embedding", "layer 0", "layer 1", "the final norm", "logits"):
        assert stage in result.stdout
    assert "Qwen3ForCausalLM agrees with Hugging Face at every stage" in result.stdout


def assert_agrees(folder, architecture):
    result = CliRunner().invoke(app, ["check", str(folder)])
    assert result.exit_code == 0, result.output
    assert "layer 3" in result.output
    assert f"{architecture} agrees with Hugging Face at every stage" in result.output


@pytest.mark.parametrize(
    ("name", "architecture"), [("qwen3_next", "Qwen3NextForCausalLM"), ("qwen3_5", "Qwen3_5ForCausalLM")]
)
def test_trained_hybrids_agree(name, architecture):
    assert_agrees(CHECKPOINTS / name, architecture)


def test_the_text_of_a_hybrid_with_images_agrees_its_experts_in_one_tensor_a_matrix(tmp_path):
    folder = make_hybrid(tmp_path / "model", "qwen3_5_moe_vl")
    respell(folder, fused)
    assert_agrees(folder, "Qwen3_5MoeForConditionalGeneration")


def test_a_checkpoint_that_does_not_fit_is_one_line_and_exits_1(checkpoint):
    weights = load_file(checkpoint / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, checkpoint / "model.safetensors")
    result = run_cli("check", str(checkpoint))
    assert result.returncode == 1
    assert "missing (1): model.norm.weight" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"quantization_config": {"quant_method": "fp8"}}, "Check the checkpoint that it was quantised from"),
        ({"initializer_range": None}, "Transformers"),
        ({"text_config": "a text"}, "text_config='a text'; an object is needed"),
    ],
)
def test_a_checkpoint_without_a_reference_is_one_line_and_exits_1(checkpoint, changes, said):
    path = checkpoint / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    result = run_cli("check", str(checkpoint))
    assert result.returncode == 1
    assert str(path) in result.stderr.splitlines()[-1]
    assert said in result.stderr.splitlines()[-1]
    assert "Traceback" not in result.stderr
    assert "differs" not in result.stdout


def test_a_forced_kernel_that_cannot_run_is_said(checkpoint):
    result = run_cli("check", str(checkpoint), ATOM_KERNELS="attention=triton")
    assert result.returncode == 1
    assert "attention=triton, which cannot run on cpu" in result.stderr


def test_an_unknown_dtype_is_told_the_known_ones(checkpoint):
    result = run_cli("check", str(checkpoint), "--dtype", "int4")
    assert result.returncode == 2
    assert "float32" in result.stderr
