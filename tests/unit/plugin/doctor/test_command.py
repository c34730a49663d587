"""The doctor's reading of a server's command line."""

from __future__ import annotations

import pytest

from atom_plugin.doctor.command import (
    check_flags,
    check_model_impl,
    local_model,
    parse_command,
    tensor_parallel_size,
)
from atom_plugin.vllm.flags import QUANTIZATIONS


def parse(text):
    return parse_command(text.split())


@pytest.mark.parametrize(
    "text",
    [
        "vllm serve M --model-impl atom --port 1",
        "vllm serve M --port=1 --model-impl=atom",
        "/opt/bin/vllm serve M --model_impl atom",
        "vllm serve --model M --model-impl atom",
        "vllm serve M --model-impl auto --model-impl atom",
        "python -m vllm.entrypoints.openai.api_server --model M --model-impl atom",
    ],
)
def test_a_command_for_us(text):
    command = parse(text)
    assert command.model == "M"
    assert command.flags["--model-impl"] == "atom"
    assert list(check_model_impl(command)) == []


def test_variables_before_the_command():
    command = parse("env VLLM_PLUGINS=a,b ATOM_KERNELS=x=y vllm serve M")
    assert command.environment == {"VLLM_PLUGINS": "a,b", "ATOM_KERNELS": "x=y"}
    assert command.model == "M"


@pytest.mark.parametrize("text", ["ls", "python serve.py", "vllm bench M", "A=b"])
def test_another_command(text):
    with pytest.raises(ValueError, match="is not the command of a vLLM or SGLang server"):
        parse(text)


@pytest.mark.parametrize("value", ["atmo", "Atom", "ATOM", "atom-plugin"])
def test_a_misspelt_implementation(value):
    (finding,) = check_model_impl(parse(f"vllm serve M --model-impl {value}"))
    assert f"--model-impl '{value}' is neither 'atom' nor one of vLLM's" in finding.problem
    assert "runs its own model" in finding.consequence
    assert finding.remedy == "Use --model-impl atom."


@pytest.mark.parametrize("value", ["auto", "vllm", "transformers"])
def test_another_implementation(value):
    (finding,) = check_model_impl(parse(f"vllm serve M --model-impl {value}"))
    assert f"--model-impl {value} asks for another implementation" in finding.problem


def test_no_implementation():
    (finding,) = check_model_impl(parse("vllm serve M"))
    assert finding.problem == "The command has no --model-impl."


def test_a_misspelt_flag():
    (finding,) = check_model_impl(parse("vllm serve M --model-imp atom"))
    assert finding.problem == "The command has --model-imp."


def test_a_config_file_is_mentioned():
    (finding,) = check_model_impl(parse("vllm serve M --config c.yaml"))
    assert "--config is not read here" in finding.problem


@pytest.mark.parametrize(
    "flags", ["--enable-lora", "--runner pooling", "--quantization awq", "-q fp4", "--convert embed", "--enable-dbo"]
)
def test_refused_flags(flags):
    (finding,) = check_flags(parse(f"vllm serve M --model-impl atom {flags}"))
    assert finding.problem.startswith(f"{flags}: ")
    assert "refuses to start" in finding.consequence


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("--moe-backend triton", "--moe-backend triton: atom-plugin does not support the choice of a backend"),
        ("--block-size 24", "--block-size 24: "),
        ("--no-disable-cascade-attn", "--no-disable-cascade-attn: "),
        ("-cc.pass_config.fuse_norm_quant=true", "-cc.pass_config.fuse_norm_quant true: "),
        ('-cc={"custom_ops":["+rms_norm"]}', "-cc.custom_ops ["),
        ('--kernel-config {"moe_backend":"marlin"}', "--kernel-config.moe_backend marlin: "),
        ('--speculative-config={"method":"eagle3"}', "--speculative-config.method eagle3: "),
    ],
)
def test_what_asks_for_code_of_vllms_own_models(text, problem):
    (finding,) = check_flags(parse(f"vllm serve M --model-impl atom {text}"))
    assert finding.problem.startswith(problem)


def test_variables_are_looked_at_too():
    command = parse("vllm serve M --model-impl atom")
    (finding,) = check_flags(command, {"VLLM_BATCH_INVARIANT": "1", "VLLM_MARLIN_USE_ATOMIC_ADD": "0"})
    assert finding.problem.startswith("VLLM_BATCH_INVARIANT=1: ")


def test_vllms_attention_may_be_chosen_where_it_runs():
    command = parse("vllm serve M --model-impl atom --attention-backend TRITON_ATTN")
    (finding,) = check_flags(command)
    assert "ATOM_DISABLE_VLLM_ATTENTION=1" in finding.remedy
    assert list(check_flags(command, {"ATOM_DISABLE_VLLM_ATTENTION": "1"})) == []


@pytest.mark.parametrize(
    "flags",
    [
        "--runner generate",
        *(f"--quantization {name}" for name in QUANTIZATIONS),
        "--cpu-offload-gb 0",
        "--max-model-len 512",
        "--block-size 64",
        "--moe-backend auto",
        "--disable-cascade-attn",
        "-dcp 1",
        "--no-enable-prefix-caching",
    ],
)
def test_other_flags(flags):
    assert list(check_flags(parse(f"vllm serve M --model-impl atom {flags}"))) == []


def test_local_model(tmp_path):
    assert local_model(parse(f"vllm serve {tmp_path}")) == tmp_path
    assert local_model(parse("vllm serve Qwen/Qwen3-8B")) is None


@pytest.mark.parametrize(("flags", "size"), [("", 1), ("-tp 2", 2), ("--tensor-parallel-size=4", 4), ("-tp two", 1)])
def test_tensor_parallel_size(flags, size):
    assert tensor_parallel_size(parse(f"vllm serve M {flags}")) == size
