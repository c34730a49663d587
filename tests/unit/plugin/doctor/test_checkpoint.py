"""The doctor's reading of a checkpoint's folder."""

from __future__ import annotations

import json
import shutil

import pytest

from atom_plugin.doctor.checkpoint import check_checkpoint
from atom_plugin.doctor.framework import SGLANG


@pytest.fixture
def checkpoint(tiny_checkpoint, tmp_path):
    """A copy of a good checkpoint, with changes to its config."""

    def write(**changes):
        folder = tmp_path / "model"
        shutil.copytree(tiny_checkpoint, folder)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, **changes}))
        return folder

    return write


def test_a_good_one(checkpoint):
    assert list(check_checkpoint(checkpoint())) == []


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "'GPT2LMHeadModel' is not supported; supported: DeepseekV2"),
        ({"architectures": []}, "names no architecture"),
        ({"quantization_config": {"quant_method": "awq", "bits": 4}}, "'awq' is not supported; supported: "),
        ({"quantization_config": {"quant_method": "fp8"}}, "but config.json says FP8"),
        ({"num_key_value_heads": 3}, "num_key_value_heads=3"),
        ({"intermediate_size": 96}, "mlp"),
        ({"text_config": "a text"}, "text_config='a text'; an object is needed"),
        ({"text_config": ["a list"]}, "text_config=['a list']; an object is needed"),
    ],
)
def test_what_cannot_be_served(checkpoint, changes, problem):
    folder = checkpoint(**changes)
    (finding,) = check_checkpoint(folder)
    assert problem in finding.problem
    assert str(folder) in finding.problem
    assert "refuses to start" in finding.consequence
    assert "--model-impl auto" in finding.remedy


def test_under_sglang_the_way_out_is_sglangs(checkpoint):
    (finding,) = check_checkpoint(checkpoint(num_key_value_heads=3), framework=SGLANG)
    assert finding.consequence == SGLANG.refused
    assert finding.remedy.endswith("or unset SGLANG_EXTERNAL_MODEL_PACKAGE for this model.")


def test_sglang_runs_an_architecture_that_is_not_ours_itself(checkpoint):
    (finding,) = check_checkpoint(checkpoint(architectures=["GPT2LMHeadModel"]), framework=SGLANG)
    assert finding.consequence == "SGLang runs its own model, with a warning in its log."


def test_two_reasons_are_found_at_once(checkpoint):
    folder = checkpoint(architectures=["GPT2LMHeadModel"], quantization_config={"quant_method": "awq"})
    assert len(list(check_checkpoint(folder))) == 2


def test_pickled_weights(checkpoint):
    folder = checkpoint()
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    (finding,) = check_checkpoint(folder)
    assert "no *.safetensors file" in finding.problem


def test_truncated_weights(checkpoint):
    folder = checkpoint()
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    (finding,) = check_checkpoint(folder)
    assert "model.safetensors is damaged" in finding.problem


def test_heads_that_do_not_divide_over_the_ranks(checkpoint):
    folder = checkpoint()
    assert list(check_checkpoint(folder, tensor_parallel_size=2)) == []
    (finding,) = check_checkpoint(folder, tensor_parallel_size=3)
    assert "tensor parallel size 3 does not divide" in finding.problem
    assert finding.remedy.startswith("Use another number of ranks, or ")


def test_a_damaged_checkpoint_is_to_be_corrected_however_many_ranks_there_are(checkpoint):
    folder = checkpoint()
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    (finding,) = check_checkpoint(folder, tensor_parallel_size=2)
    assert finding.remedy.startswith("Correct the checkpoint, or ")


@pytest.mark.parametrize(("text", "problem"), [(None, "no config.json"), ("{", "not valid JSON")])
def test_no_readable_config(tmp_path, text, problem):
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    (finding,) = check_checkpoint(tmp_path)
    assert problem in finding.problem
