"""The doctor on drafts by a checkpoint's own layers in vLLM."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from atom_plugin.doctor.command import parse_command, pipeline_parallel_size
from atom_plugin.doctor.speculation import Speculation, check_own_layers

CHECKPOINTS = Path(__file__).parents[3] / "checkpoints"
OWN = ("deepseek_v3", "qwen3_5", "qwen3_next")
MTP = '--speculative-config={"method":"mtp","num_speculative_tokens":2}'


def found(flags, folder):
    command = parse_command(f"vllm serve {folder} --model-impl atom {flags}".split())
    return list(check_own_layers(folder, command))


def changed(folder, source, **values):
    """A copy of a checkpoint of the tests, with other values in its configuration."""
    shutil.copytree(CHECKPOINTS / source, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **values}))
    return folder


@pytest.mark.parametrize("name", OWN)
@pytest.mark.parametrize(
    "flags",
    [
        "",
        MTP,
        "--spec-method mtp --spec-tokens 2 -tp 2",
        MTP.replace("mtp", "deepseek_mtp"),
        f'{MTP[:-1]},"draft_tensor_parallel_size":1,"kv_cache_dtype":null}}',
        f'{MTP[:-1]},"kv_cache_dtype":"fp8"}} --kv-cache-dtype fp8',
    ],
)
def test_layers_that_draft(name, flags):
    assert found(flags, CHECKPOINTS / name) == []


@pytest.mark.parametrize("flags", ["", "--spec-method ngram --spec-tokens 2"])
def test_without_drafts_by_them_nothing_is_said_of_them(tmp_path, flags):
    assert found(flags, changed(tmp_path / "model", "qwen3_5", mtp_num_hidden_layers=0)) == []


@pytest.mark.parametrize("name", OWN)
def test_a_checkpoint_without_their_weights(tmp_path, name):
    folder = changed(tmp_path / "model", name)
    for file in folder.glob("*.safetensors"):
        tensors = {key: it for key, it in load_file(file).items() if not key.startswith(("mtp.", "model.layers.5."))}
        save_file(tensors, file, metadata={"format": "pt"})
    if (index := folder / "model.safetensors.index.json").exists():
        index.unlink()
    (finding,) = found(MTP, folder)
    assert "has no weights to draft with" in finding.problem
    assert finding.remedy == "Leave speculative decoding by them out."
    assert finding.consequence == "`--model-impl atom` refuses to start."
    assert found(f"{MTP} --load-format dummy", folder) == []


@pytest.mark.parametrize(
    ("name", "values", "problem"),
    [
        ("qwen3_5", {"mtp_num_hidden_layers": 2}, "mtp.layers.1."),
        ("qwen3_5", {"mtp_num_hidden_layers": 0}, "mtp_num_hidden_layers=0"),
        ("qwen3_5", {"mtp_num_hidden_layers": None}, "mtp_num_hidden_layers is null"),
        ("qwen3_5", {"mtp_use_dedicated_embeddings": True}, "mtp_use_dedicated_embeddings=true"),
        ("qwen3_next", {"num_nextn_predict_layers": 0}, "num_nextn_predict_layers=0"),
        ("qwen3_next", {"num_nextn_predict_layers": None}, "num_nextn_predict_layers is null"),
        ("deepseek_v3", {"num_nextn_predict_layers": 0}, "num_nextn_predict_layers=0"),
        ("llama", {}, "not supported for LlamaForCausalLM"),
    ],
)
def test_layers_that_do_not_fit(tmp_path, name, values, problem):
    (finding,) = found(MTP, changed(tmp_path / "model", name, **values))
    assert problem in finding.problem + finding.remedy


def test_layers_that_cannot_take_turns(tmp_path):
    folder = changed(tmp_path / "model", "deepseek_v3", num_nextn_predict_layers=2)
    assert found(f"{MTP} --load-format dummy", folder) == []
    (finding,) = found(f"{MTP.replace(':2', ':3')} --load-format dummy", folder)
    assert "num_speculative_tokens=3 (--speculative-config) is no multiple of num_nextn" in finding.problem


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (f"{MTP} -pp 2", "--pipeline-parallel-size 2"),
        (f'{MTP[:-1]},"draft_tensor_parallel_size":1}} -tp 2', "draft_tensor_parallel_size=1"),
        (f'{MTP[:-1]},"kv_cache_dtype":"fp8"}}', "kv_cache_dtype=fp8"),
        (f'{MTP[:-1]},"draft_lm_head_quantization":"fp8"}}', "draft_lm_head_quantization=fp8"),
        (f"{MTP} --load-format sharded_state", "--load-format sharded_state"),
    ],
)
def test_settings_beside_them(flags, problem):
    (finding,) = found(flags, CHECKPOINTS / "qwen3_5")
    assert f"does not support multi-token prediction (method 'mtp') with {problem}" in finding.problem
    assert finding.remedy == "Leave one of them out."


@pytest.mark.parametrize("method", ["mtp", "draft_model", None])
def test_layers_of_another_model(tmp_path, method):
    """vLLM drafts by them, whatever was asked for."""
    small = changed(tmp_path / "small", "qwen3_5", hidden_size=32)
    for folder, differs in (
        (small, "its hidden_size is 32"),
        (CHECKPOINTS / "qwen3_next", "its architecture is Qwen3Ne"),
    ):
        given = {"model": str(folder), "num_speculative_tokens": 2} | ({"method": method} if method else {})
        (finding,) = found(f"--speculative-config={json.dumps(given, separators=(',', ':'))}", CHECKPOINTS / "qwen3_5")
        assert f"by the layers of {folder}, which do not fit the target: {differs}" in finding.problem


def test_a_draft_model_without_such_layers_is_not_asked():
    given = {"model": str(CHECKPOINTS / "llama"), "method": "draft_model", "num_speculative_tokens": 2}
    assert found(f"--speculative-config={json.dumps(given, separators=(',', ':'))}", CHECKPOINTS / "qwen3_5") == []


@pytest.mark.parametrize(
    ("flags", "method"),
    [
        ("", None),
        (f"--spec-model {CHECKPOINTS / 'llama'} --spec-tokens 3", "draft_model"),
        (f"--spec-model {CHECKPOINTS / 'qwen3_5'} --spec-tokens 3", "mtp"),
        (f"--spec-method draft_model --spec-model {CHECKPOINTS / 'qwen3_5'} --spec-tokens 3", "mtp"),
        ("--spec-model some/name --spec-tokens 3", ""),
        ("--spec-method qwen3_next_mtp --spec-tokens 3", "mtp"),
        ("--spec-method ngram --spec-tokens 3", "ngram"),
    ],
)
def test_the_method_is_vllms(flags, method):
    speculation = Speculation(parse_command(f"vllm serve M {flags}".split()).flags)
    assert (speculation.method, speculation.num_drafts) == (method, 3 if flags else 0)


def test_there_is_one_stage_at_least():
    assert [pipeline_parallel_size(parse_command(f"vllm serve M -pp {it}".split())) for it in ("0", "2", "x")] == [
        1,
        2,
        1,
    ]


def test_without_a_model_the_present_folder_is_not_asked(monkeypatch):
    monkeypatch.chdir(CHECKPOINTS / "qwen3_5")
    flags = parse_command("vllm serve M --spec-method draft_model --spec-tokens 1".split()).flags
    assert Speculation(flags).method == "draft_model"
