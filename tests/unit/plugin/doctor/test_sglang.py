"""The doctor's checks of an SGLang command and of SGLang's variables."""

from __future__ import annotations

import pytest

from atom_plugin.common.flags import refusals
from atom_plugin.doctor.command import check_command, check_flags, local_model, parse_command, tensor_parallel_size
from atom_plugin.doctor.framework import SGLANG
from atom_plugin.doctor.sglang import (
    check_asked_for,
    check_attention_backends,
    check_sglang_variables,
)
from atom_plugin.sglang.flags import CACHE_DTYPES, LOAD_FORMATS, QUANTIZATIONS, TABLE

PACKAGE = "SGLANG_EXTERNAL_MODEL_PACKAGE"
OURS = {PACKAGE: "atom_plugin.sglang.models"}


def parse(text):
    return parse_command(text.split())


@pytest.mark.parametrize(
    "text",
    [
        "python -m sglang.launch_server --model-path M --port 1",
        "python3 -u -m sglang.launch_server --port=1 --model-path=M",
        "python -m sglang.launch_server --model M",
        "sglang serve --model-path M",
        "/opt/bin/sglang serve M --port 1",
    ],
)
def test_a_command(text):
    command = parse(text)
    assert command.framework is SGLANG
    assert command.model == "M"
    assert list(check_command(command, OURS)) == []


def test_variables_before_the_command():
    command = parse(f"env SGLANG_PLUGINS=atom {PACKAGE}=x sglang serve M")
    assert command.environment == {"SGLANG_PLUGINS": "atom", PACKAGE: "x"}


@pytest.mark.parametrize("text", ["sglang generate --model-path M", "python -m sglang.bench_serving", "sglang"])
def test_another_command(text):
    with pytest.raises(ValueError, match="not the command of a vLLM or SGLang server"):
        parse(text)


@pytest.mark.parametrize("environ", [{}, {PACKAGE: ""}, {"SGLANG_EXTERNAL_MM_PROCESSOR_PACKAGE": "x"}])
def test_our_package_is_not_asked_for(environ):
    (finding,) = check_asked_for(environ)
    assert finding.problem == f"{PACKAGE} is set neither in the environment nor in the command."
    assert finding.consequence == "SGLang silently runs its own model."
    assert finding.remedy == f"Put {PACKAGE}=atom_plugin.sglang.models before the command."


@pytest.mark.parametrize("name", ["SGLANG_EXTERNAL_MODELS_PACKAGE", "SGL_EXTERNAL_MODEL_PACKAGE"])
def test_a_misspelt_variable(name):
    (finding,) = check_asked_for({name: "atom_plugin.sglang.models"})
    assert finding.problem.endswith(f"; {name} is.")


@pytest.mark.parametrize(
    ("package", "consequence"),
    [
        ("atom_plugin", "We refuse to start"),
        ("atom_plugin.sglang", "We refuse to start"),
        ("atom_plugin.sglang.model", "We refuse to start"),
        ("atom-plugin.sglang.models", "cannot import it"),
        (" atom_plugin.sglang.models", "cannot import it"),
        ("atomplugin.sglang.models", "none of them is ours"),
        ("somebody.models", "none of them is ours"),
    ],
)
def test_another_package(package, consequence):
    environ = {PACKAGE: package}
    (finding,) = check_sglang_variables(environ)
    assert finding.problem == f"{PACKAGE}={package!r} is not the package with our models."
    assert consequence in finding.consequence
    assert finding.remedy == f"Set {PACKAGE}=atom_plugin.sglang.models."
    assert list(check_asked_for(environ)) == []


@pytest.mark.parametrize("value", ["other", ",", "Atom", "atom-plugin, other"])
def test_sglang_plugins_without_our_name(value):
    (finding,) = check_sglang_variables({"SGLANG_PLUGINS": value})
    assert f"SGLANG_PLUGINS={value!r} leaves out 'atom'" in finding.problem
    assert "does not know `--attention-backend atom`" in finding.consequence
    assert "atom), or unset SGLANG_PLUGINS" in finding.remedy


@pytest.mark.parametrize("value", ["", "atom", " other , atom "])
def test_sglang_plugins_with_our_name(value):
    assert list(check_sglang_variables({**OURS, "SGLANG_PLUGINS": value})) == []


def test_our_module_among_the_disabled():
    (finding,) = check_sglang_variables({"SGLANG_DISABLED_MODEL_ARCHS": "llama, dense"})
    assert "names 'dense'" in finding.problem
    assert "skips atom_plugin.sglang.models.dense" in finding.consequence
    assert list(check_sglang_variables({"SGLANG_DISABLED_MODEL_ARCHS": "llama,densely"})) == []


@pytest.mark.parametrize(
    ("flags", "consequence"),
    [
        ("--prefill-attention-backend atom --decode-attention-backend triton", "refuses to start"),
        ("--attention-backend atom --decode-attention-backend triton", "refuses to start"),
        ("--prefill-attention-backend=atom", "picks its own backend"),
    ],
)
def test_backends_that_part(flags, consequence):
    (finding,) = check_attention_backends(parse(f"sglang serve M {flags}").flags)
    assert "Prefill runs on the attention backend atom" in finding.problem
    assert consequence in finding.consequence
    assert "--attention-backend" in finding.remedy


@pytest.mark.parametrize(
    "flags",
    [
        "",
        "--attention-backend atom",
        "--attention-backend triton",
        "--prefill-attention-backend atom --decode-attention-backend atom",
        "--prefill-attention-backend fa3 --decode-attention-backend flashinfer",
    ],
)
def test_backends_that_agree_or_are_sglangs(flags):
    assert list(check_attention_backends(parse(f"sglang serve M {flags}").flags)) == []


@pytest.mark.parametrize(
    "flags",
    [
        "--enable-lora",
        "--lora-paths a",
        "--is-embedding",
        "--quantization awq",
        "--kv-cache-dtype mxfp8",
        "--load-format gguf",
        "--speculative-algorithm EAGLE3",
        "--speculative-algorithm NGRAM",
        "--speculative-adaptive",
        "--enable-unified-memory",
        "--speculative-eagle-topk 4",
        "--cpu-offload-gb 4",
        "--offload-group-size 2",
        "--load-format layered",
        "--speculative-draft-window-size 64 --attention-backend atom",
        "--model-impl transformers",
        "--moe-runner-backend triton",
        "--fp8-gemm-backend cutlass",
        "--enable-layernorm-sp",
        "--rl-on-policy-target fsdp",
    ],
)
def test_refused_flags(flags):
    (finding,) = check_flags(parse(f"sglang serve M {flags}"))
    assert finding.problem.startswith(f"{flags.removesuffix(' --attention-backend atom')}: ")
    assert finding.consequence == SGLANG.refused
    said = {row.instead for row in refusals(TABLE)}
    assert finding.remedy.endswith(f"or unset {PACKAGE} for this model.") or finding.remedy in said


@pytest.mark.parametrize(
    "flags",
    [
        *(f"--quantization {name}" for name in QUANTIZATIONS),
        "--offload-group-size -1",
        "--speculative-eagle-topk 1",
        "--speculative-algorithm STANDALONE",
        "--attn-cp-size 1",
        "--enable-dp-attention",
        "--attn-dp-size 2",
        "--model-impl sglang --moe-runner-backend auto",
        "--disable-radix-cache --device cpu",
        "--speculative-adaptive --attention-backend triton",
        "--speculative-algorithm EAGLE --speculative-draft-load-format pt",
        *(f"--kv-cache-dtype {dtype}" for dtype in CACHE_DTYPES),
        *(f"--load-format {form}" for form in LOAD_FORMATS),
    ],
)
def test_other_flags(flags):
    assert list(check_flags(parse(f"sglang serve M {flags}"))) == []


def test_refused_variables():
    command = parse("SGLANG_INT4_WEIGHT=1 SGLANG_MOE_PADDING=1 sglang serve M")
    (finding,) = check_flags(command, command.environment)
    assert finding.problem == "SGLANG_INT4_WEIGHT=1: atom-plugin does not support 4-bit weights; supported: 0."
    assert finding.consequence == SGLANG.refused
    assert finding.remedy == f"Unset it, or unset {PACKAGE}."


def test_local_model(tmp_path):
    assert local_model(parse(f"sglang serve --model-path {tmp_path}")) == tmp_path
    assert local_model(parse("sglang serve Qwen/Qwen3-8B")) is None


@pytest.mark.parametrize(("flags", "size"), [("", 1), ("--tp 2", 2), ("--tp-size=4", 4)])
def test_tensor_parallel_size(flags, size):
    assert tensor_parallel_size(parse(f"sglang serve M {flags}")) == size
