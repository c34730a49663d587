"""The doctor on models with linear attention, and on checkpoints with images."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3_5Config

from atom_core.kernels.select import Target
from atom_plugin.common.versions import Installed
from atom_plugin.doctor import hybrid
from atom_plugin.doctor.checkpoint import check_checkpoint
from atom_plugin.doctor.command import parse_command, tensor_parallel_size
from atom_plugin.doctor.hybrid import check_images, check_sglang_drafts, check_sglang_settings, check_states
from tests.unit.plugin.installed import add_distribution, run_cli

CHECKPOINTS = Path(__file__).parents[3] / "checkpoints"
NEXT, DENSE = CHECKPOINTS / "qwen3_next", CHECKPOINTS / "qwen3_5"
CPU, GPU = Target("cpu", ""), Target("cuda", "sm90")
MTP = '--speculative-config={"method":"mtp","num_speculative_tokens":1}'


@pytest.fixture
def wrapper(tmp_path):
    """The trained Qwen3.5 as a checkpoint with images has its text."""
    folder = tmp_path / "wrapper"
    folder.mkdir()
    text = json.loads((DENSE / "config.json").read_text())
    whole = Qwen3_5Config(text_config=text, vision_config={"depth": 1}).to_dict()
    whole["architectures"] = ["Qwen3_5ForConditionalGeneration"]
    (folder / "config.json").write_text(json.dumps(whole))
    tensors = {
        name.replace("model.", "model.language_model.", 1) if name.startswith("model.") else name: tensor
        for name, tensor in load_file(DENSE / "model.safetensors").items()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def with_values(folder, **values):
    """A copy of the trained Qwen3.5 with other values in its configuration."""
    shutil.copytree(DENSE, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **values}))
    return folder


def of_states(flags, *, folder=NEXT, target=GPU, environ=None):
    command = parse_command(f"vllm serve {folder} --model-impl atom {flags}".split())
    return list(check_states(folder, command, environ or {}, target))


@pytest.mark.parametrize("flags", ["", "--language-model-only=false"])
def test_images_are_not_served_in_vllm(wrapper, flags):
    command = parse_command(f"vllm serve {wrapper} --model-impl atom {flags}".split())
    (finding,) = check_images(wrapper, command)
    assert finding.problem == f"{wrapper} is a checkpoint with images: atom-plugin does not support multimodal input."
    assert finding.consequence == "`--model-impl atom` refuses to start."
    assert "Add --language-model-only" in finding.remedy


@pytest.mark.parametrize(
    "command",
    [
        "vllm serve M --model-impl atom --language-model-only",
        "vllm serve M --language_model_only --model-impl atom",
        "sglang serve M",
    ],
)
def test_the_text_of_a_checkpoint_with_images_is(wrapper, command):
    assert list(check_images(wrapper, parse_command(command.split()))) == []
    assert list(check_checkpoint(wrapper)) == []


@pytest.mark.parametrize("command", ["vllm serve M --model-impl atom", "sglang serve M"])
def test_a_checkpoint_of_text_alone_may_say_so(tmp_path, command):
    folder = with_values(tmp_path / "model", text_config=None)
    assert list(check_images(folder, parse_command(command.split()))) == []


def settings_of(flags, folder, target=CPU):
    return list(check_sglang_settings(folder, parse_command(f"sglang serve {folder} {flags}".split()), target))


@pytest.mark.parametrize("flag", ["--enable-multimodal", "--tokenizer-worker-num 2"])
def test_images_are_not_served_in_sglang(wrapper, flag):
    (finding,) = settings_of(flag, wrapper)
    assert finding.problem.startswith(f"{flag} is not supported")
    assert finding.remedy.startswith("Leave it out")
    assert finding.consequence == "SGLang, asked for our models, refuses to start."
    assert settings_of("--tokenizer-worker-num 1", wrapper) == []
    assert settings_of(flag, DENSE) == []


@pytest.mark.parametrize(
    ("flags", "target", "refused"),
    [
        ("--page-size 16", CPU, True),
        ("--page-size 16 --device cpu", GPU, True),
        ("--page-size 16", GPU, False),
        ("--page-size 16 --disable-radix-cache", CPU, False),
        ("--page-size 1", CPU, False),
        ("--page-size 16 --mamba-radix-cache-strategy no_buffer", CPU, False),
    ],
)
def test_pages_of_states_on_a_cpu_in_sglang(flags, target, refused):
    assert ["--page-size 16 with prefix" in it.problem for it in settings_of(flags, DENSE, target)] == [True] * refused


@pytest.mark.parametrize(
    ("flags", "folder", "problem"),
    [
        ("--tp 2 --attn-dp-size 2", DENSE, "is for mixtures of experts"),
        ("--tp 2 --enable-dp-attention --dp 2", CHECKPOINTS / "llama", "is for mixtures of experts"),
        ("--tp 2 --dp 2", DENSE, None),
        ("--tp 2 --attn-dp-size 2", NEXT, None),
        ("--tp 3 --attn-dp-size 2", NEXT, "does not divide --tp-size 3"),
        ("--tp two --attn-dp-size x", NEXT, None),
    ],
)
def test_requests_shared_out_over_ranks_in_sglang(flags, folder, problem):
    assert [problem in finding.problem for finding in settings_of(flags, folder)] == [True] * (problem is not None)


def test_a_draft_without_quantisation_of_its_own_in_sglang():
    flags = f"{NEXTN} 3 --speculative-draft-model-quantization"
    assert of_sglang(f"{flags} unquant") == []
    (finding,) = of_sglang(f"{flags} fp8")
    assert "--speculative-draft-model-quantization fp8" in finding.problem


@pytest.mark.parametrize(("draft", "problem"), [("qwen3_5", None), ("llama", "does not support draft models")])
@pytest.mark.parametrize("method", ["--spec-method draft_model", ""])
def test_a_draft_model_whose_layers_draft_is_none(method, draft, problem):
    """vLLM's method is mtp then, whatever was asked for."""
    flags = f"--no-enable-prefix-caching {method} --spec-model {CHECKPOINTS / draft} --spec-tokens 1"
    assert [problem in finding.problem for finding in of_states(flags, folder=DENSE)] == [True] * (problem is not None)


@pytest.mark.parametrize("target", [CPU, GPU], ids=str)
@pytest.mark.parametrize(
    "flags",
    [
        "",
        "--enable-prefix-caching",
        f"--no-enable-prefix-caching {MTP}",
        f"--no-enable-prefix-caching {MTP.replace('mtp', 'qwen3_next_mtp')}",
        "--mamba-cache-mode all",
        "--dtype float16 --mamba-ssm-cache-dtype float32",
    ],
)
def test_commands_that_are_served(flags, target):
    assert of_states(flags, target=target) == []


def test_other_models_may_be_asked_for_more(tiny_checkpoint):
    assert of_states(MTP, folder=tiny_checkpoint, target=CPU) == []


@pytest.mark.parametrize(
    ("target", "variable", "older"),
    [(CPU, None, True), (CPU, "1", False), (GPU, None, False), (GPU, "0", True), (GPU, "1", False)],
    ids=str,
)
@pytest.mark.parametrize("flags", [MTP, "--spec-method ngram --spec-tokens 3", '-sc {"num_speculative_tokens":2}'])
def test_drafts_behind_cached_prefixes_want_the_newer_model_runner(target, variable, older, flags):
    environ = {} if variable is None else {"VLLM_USE_V2_MODEL_RUNNER": variable}
    found = of_states(flags, target=target, environ=environ)
    assert len(found) == older
    for finding in found:
        assert "speculative decoding with prefix caching" in finding.problem
        assert finding.problem.endswith("leaves out.")
        assert finding.remedy == "Add --no-enable-prefix-caching, or leave out --speculative-config."


@pytest.mark.parametrize(
    ("version", "method", "older"),
    [
        ("0.31.0", "ngram", True),
        ("0.32.0", "ngram", False),
        (None, "ngram", False),
        ("0.33.0", "suffix", True),
        ("0.31.0", "mtp", False),
    ],
)
def test_what_drafts_on_the_older_model_runner_alone(monkeypatch, version, method, older):
    found = None if version is None else Installed("vllm", version)
    monkeypatch.setattr(hybrid, "installed", lambda package: found)
    assert bool(of_states(f"--spec-method {method} --spec-tokens 3")) == older


@pytest.mark.parametrize(
    ("flags", "problem", "remedy"),
    [
        (MTP.replace("1", "8"), "num_speculative_tokens=8", "Leave it out, or use --model-impl auto"),
        (MTP.replace("mtp", "draft_model"), "does not support draft models", "Use mtp"),
        ("--mamba-ssm-cache-dtype float16", "states of linear attention in float16", "Add --mamba-ssm-cache-dtype"),
        ("--mamba-cache-dtype float16", "states of linear attention in float16", "Add --mamba-ssm-cache-dtype"),
        ("--dtype half", "states of linear attention in float16", "Add --mamba-ssm-cache-dtype float32"),
        ("--no-enable-prefix-caching --spec-method suffix", "num_speculative_tokens=24", "Leave it out"),
    ],
)
def test_what_is_refused_is_told_by_name(flags, problem, remedy):
    (finding,) = of_states(flags)
    assert problem in finding.problem
    assert finding.remedy.startswith(remedy)


@pytest.mark.parametrize(
    ("whole", "text", "vision", "in_halves"),
    [
        ("float16", None, None, True),
        ("float16", "bfloat16", None, True),
        ("bfloat16", "float16", None, False),
        (None, "float16", "bfloat16", True),
        (None, None, "float16", True),
        (None, None, None, False),
    ],
)
def test_states_have_the_dtype_of_the_whole_checkpoint_with_images(wrapper, whole, text, vision, in_halves):
    values = json.loads((wrapper / "config.json").read_text())
    for part, dtype in ((values, whole), (values["text_config"], text), (values["vision_config"], vision)):
        part["dtype"] = dtype
    (wrapper / "config.json").write_text(json.dumps(values))
    found = of_states("--language-model-only", folder=wrapper)
    assert ["in float16" in finding.problem for finding in found] == [True] * in_halves
    assert of_states("--language-model-only --mamba-ssm-cache-dtype float32", folder=wrapper) == []


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_states_have_the_dtype_of_files_whose_configuration_names_none(tmp_path, dtype):
    folder = with_values(tmp_path / "model", dtype=None)
    tensors = load_file(folder / "model.safetensors")
    save_file({name: it.to(dtype) for name, it in tensors.items()}, folder / "model.safetensors")
    assert bool(of_states("", folder=folder)) == (dtype == torch.float16)
    (folder / "model.safetensors").unlink()
    assert of_states("", folder=folder) == []


@pytest.mark.parametrize(
    ("flags", "partition", "stage"),
    [
        ("-pp 2", None, "--pipeline-parallel-size 2 gives stage 0 layers 0 to 1, none of which has full"),
        ("--pipeline-parallel-size=3", None, "gives stage 0 layers 0 to 0"),
        ("-pp 2", "3,1", "gives stage 0 layers 0 to 2"),
        ("-pp 2", "1,2", "VLLM_PP_LAYER_PARTITION=1,2 does not share 4 layers out over 2 stages"),
        ("-pp 2", "a", "VLLM_PP_LAYER_PARTITION=a does not"),
        ("-pp 1", None, None),
    ],
)
@pytest.mark.parametrize("folder", [NEXT, DENSE], ids=lambda folder: folder.name)
def test_each_stage_needs_full_attention(folder, flags, partition, stage):
    environ = {} if partition is None else {"VLLM_PP_LAYER_PARTITION": partition}
    found = of_states(flags, folder=folder, environ=environ)
    assert [finding.problem for finding in found if stage and stage in finding.problem] == [
        it.problem for it in found[:1]
    ]
    assert bool(found) == (stage is not None)


def test_stages_that_have_it(tmp_path):
    kinds = ["linear_attention", "full_attention"] * 2
    folder = with_values(tmp_path / "model", layer_types=kinds)
    assert of_states("-pp 2", folder=folder) == []
    assert [it.problem[:40] for it in of_states("-pp 3", folder=folder)] == ["--pipeline-parallel-size 3 gives stage 0"]
    assert of_states("-pp 2", folder=folder, environ={"VLLM_PP_LAYER_PARTITION": "2,2"}) == []
    assert len(of_states("-pp 2", folder=folder, environ={"VLLM_PP_LAYER_PARTITION": "1,3"})) == 1


def test_vllms_attention_has_no_output_gate():
    (finding,) = of_states("", environ={"ATOM_DISABLE_VLLM_ATTENTION": "1"})
    assert "output gate" in finding.problem
    assert finding.remedy.startswith("Unset it")


def of_sglang(flags, *, folder=NEXT, environ=None):
    command = parse_command(f"sglang serve {folder} {flags}".split())
    return list(check_sglang_drafts(folder, command, environ or {}))


NEXTN = "--speculative-algorithm NEXTN --speculative-eagle-topk 1 --speculative-num-steps"


@pytest.mark.parametrize("flags", ["", f"{NEXTN} 3", f"{NEXTN} 7 --speculative-num-draft-tokens 8 --tp 2"])
@pytest.mark.parametrize("folder", [NEXT, DENSE, CHECKPOINTS / "deepseek_v3"], ids=lambda folder: folder.name)
def test_drafts_by_layers_of_the_checkpoint_are_served_in_sglang(folder, flags):
    assert of_sglang(flags, folder=folder) == []


@pytest.mark.parametrize(
    ("flags", "problem", "remedy"),
    [
        (f"{NEXTN} 8", "--speculative-num-draft-tokens 9", "Set it to 8"),
        (f"{NEXTN} 3 --attention-backend triton", "with --attention-backend triton", "Leave --attention-backend out."),
        (f"{NEXTN} 3 --pp-size 2", "speculation with --pp-size 2", "Leave it out, or unset"),
        (
            "--speculative-algorithm STANDALONE --speculative-draft-model-path elsewhere",
            "--speculative-algorithm STANDALONE for Qwen3NextForCausalLM",
            "Leave it out, or unset",
        ),
    ],
)
def test_what_sglang_cannot_draft_with_is_told_by_name(flags, problem, remedy):
    finding, *_ = of_sglang(flags)
    assert problem in finding.problem
    assert finding.remedy.startswith(remedy)
    assert finding.consequence == "SGLang, asked for our models, refuses to start."


def test_states_that_sglang_would_keep_in_float16(tmp_path):
    folder = shutil.copytree(NEXT, tmp_path / "model")
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**values, "mamba_ssm_dtype": "float16"}))
    (finding,) = of_sglang("", folder=folder)
    assert "mamba_ssm_dtype=float16" in finding.problem
    assert finding.remedy == "Add --mamba-ssm-dtype float32."
    assert of_sglang("--mamba-ssm-dtype bfloat16", folder=folder) == []
    assert of_sglang("", folder=folder, environ={"SGLANG_MAMBA_SSM_DTYPE": "bfloat16"}) == []


def test_layers_that_sglang_cannot_express(tmp_path):
    folder = shutil.copytree(DENSE, tmp_path / "model")
    values = json.loads((folder / "config.json").read_text())
    kinds = ["full_attention", "linear_attention", "linear_attention", "full_attention"]
    (folder / "config.json").write_text(json.dumps({**values, "layer_types": kinds}))
    (finding,) = of_sglang("", folder=folder)
    assert "full attention in layers [0, 3]" in finding.problem


def test_a_checkpoint_without_layers_to_draft_with(tmp_path):
    folder = shutil.copytree(NEXT, tmp_path / "model")
    file = folder / "model.safetensors"
    tensors = {name: it for name, it in load_file(file).items() if not name.startswith("mtp.")}
    save_file(tensors, file, metadata={"format": "pt"})
    assert of_sglang("", folder=folder) == []
    (finding,) = of_sglang(f"{NEXTN} 3", folder=folder)
    assert "no tensor is called mtp.*" in finding.problem
    assert finding.remedy == "Leave speculative decoding by them out."


@pytest.mark.parametrize("server", ["vllm serve", "sglang serve"])
def test_heads_that_do_not_divide_over_the_ranks(server):
    for ranks, says in ((2, None), (3, "3"), (4, "linear_num_key_heads")):
        command = parse_command(f"{server} {NEXT} --tp-size {ranks}".split())
        found = list(check_checkpoint(NEXT, tensor_parallel_size(command), command.framework))
        assert [says in finding.problem for finding in found] == ([] if says is None else [True])


def test_a_config_that_cannot_be_read_is_told_once(tmp_path):
    folder = shutil.copytree(NEXT, tmp_path / "model")
    (folder / "config.json").write_text("{")
    assert of_states(MTP, folder=folder, target=CPU) == []
    assert len(list(check_checkpoint(folder))) == 1


def test_the_command_line_says_it(wrapper, tmp_path):
    add_distribution(tmp_path / "site", "vllm", "0.33.0")
    command = ("vllm", "serve", str(wrapper), "--model-impl", "atom", MTP)
    result = run_cli("doctor", "--", "VLLM_USE_V2_MODEL_RUNNER=0", *command, site=tmp_path / "site")
    assert result.returncode == 1, result.stderr
    said = " ".join(result.stdout.split())
    assert "Add --language-model-only" in said
    assert "Add --no-enable-prefix-caching" in said
