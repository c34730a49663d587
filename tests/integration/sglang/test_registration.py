"""The entry point, in the real SGLang: it only adds, and adds once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib import metadata

import pytest

from atom_plugin import NEWEST
from atom_plugin.doctor.command import check_command, parse_command

pytestmark = [pytest.mark.sglang, pytest.mark.smoke]

PROBE = """
import json, sys
from sglang.srt.plugins import load_plugins

load_plugins()
light = {"atom_plugin.sglang.causal_lm", "sglang.srt.models.registry"}.isdisjoint(sys.modules)
from atom_plugin.sglang import register
from sglang.srt.arg_groups import model_override_base, resolution_hooks
from sglang.srt.server_args import ATTENTION_BACKEND_CHOICES

register()
register()
ours = {
    name: sum(function.__module__.startswith("atom_plugin") for function in functions)
    for name, functions in model_override_base._MODEL_OVERRIDE_FNS.items()
}
from sglang.srt.models.registry import ModelRegistry
from sglang.srt.plugins.hook_registry import HookRegistry

hooks = {
    target: sum(hook.__module__.startswith("atom_plugin") for _, hook, _ in registered)
    for target, registered in HookRegistry._hooks.items()
}

print(json.dumps({
    "light": light,
    "choices": ATTENTION_BACKEND_CHOICES.count("atom"),
    "overrides": {name: count for name, count in ours.items() if count},
    "steps": {
        name: sum(hook.__module__.startswith("atom_plugin") for hook in registered)
        for name, registered in resolution_hooks._HOOKS.items()
    },
    "hooks": {target: count for target, count in hooks.items() if count},
    "qwen3": ModelRegistry.resolve_model_cls(["Qwen3ForCausalLM"])[0].__module__,
}))
"""

OURS = "SGLANG_EXTERNAL_MODEL_PACKAGE=atom_plugin.sglang.models"
DRAFT_METHODS = [
    f"sglang.srt.speculative.draft_utils.DraftBackendFactory.{method}"
    for method in ("create_decode_backend", "create_draft_extend_backend")
]
UPDATE_METHODS = [
    f"sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater.{method}"
    for method in ("update_weights_from_disk", "update_weights_from_tensor")
] + ["sglang.srt.model_executor.model_runner.ModelRunner.check_weights"]
HYBRID_HOOKS = [
    "sglang.srt.layers.attention.attention_registry.attn_backend_wrapper",
    "sglang.srt.managers.tokenizer_manager.TokenizerManager._validate_one_request",
]
# What SGLang would build on ROCm is known by name alone, so the answer to "is this ROCm?" is all that is put on.
ON_ROCM = """
import json
from types import SimpleNamespace

import sglang.srt.utils
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS

import atom_plugin.sglang
from atom_plugin.sglang.models.dense import Qwen3ForCausalLM

sglang.srt.utils.is_hip = lambda: True
ATTENTION_BACKENDS["aiter"] = lambda runner: "native"
atom_plugin.sglang._build_backend = lambda runner: "ours"
atom_plugin.sglang.register()
models = [None, Qwen3ForCausalLM.__new__(Qwen3ForCausalLM)]
print(json.dumps([ATTENTION_BACKENDS["aiter"](SimpleNamespace(model=model)) for model in models]))
"""


def probe(script=PROBE, **environ):
    result = subprocess.run(
        [sys.executable, "-c", script], env={**os.environ, **environ}, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


def test_the_backend_is_known_once_and_models_stay_sglangs_own():
    found = probe()
    assert found["light"]
    assert found["choices"] == 1
    assert found["hooks"] == dict.fromkeys(DRAFT_METHODS, 1)
    assert found["steps"] == {}
    assert found["overrides"] == {}
    assert found["qwen3"] == "sglang.srt.models.qwen3"


def test_the_variable_makes_the_models_ours_and_announces_each_once():
    from atom_core.models.registry import supported_architectures

    found = probe(SGLANG_EXTERNAL_MODEL_PACKAGE="atom_plugin.sglang.models")
    assert found["qwen3"] == "atom_plugin.sglang.models.dense"
    assert found["choices"] == 1
    assert found["hooks"] == dict.fromkeys([*DRAFT_METHODS, *UPDATE_METHODS, *HYBRID_HOOKS], 1)
    assert found["steps"] == {"handle_model_source_paths": 1, "handle_model_specific_adjustments": 1}
    assert found["overrides"] == dict.fromkeys(supported_architectures(), 1)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--prefill-attention-backend aiter --decode-attention-backend triton", "the attention backend aiter"),
        ("ATOM_SHUFFLED_CACHE=1", "ATOM_SHUFFLED_CACHE=1 is for vLLM"),
        ("ATOM_KERNELS=attention=aiter_shuffled", "ATOM_KERNELS=attention=aiter_shuffled is for vLLM"),
    ],
)
def test_the_doctor_finds_what_is_refused_on_rocm(words, says):
    variables, flags = ("", words) if words.startswith("--") else (words, "")
    command = parse_command(f"{OURS} {variables} sglang serve M {flags}".split())
    (finding,) = check_command(command, command.environment)
    assert says in finding.problem
    assert finding.consequence == "SGLang, asked for our models, refuses to start."


def test_the_remedy_names_the_torch_that_sglang_asks_for():
    version, torch = NEWEST["sglang"]
    assert metadata.version("sglang") == version
    assert f"torch=={torch}" in metadata.requires("sglang")


def test_on_rocm_the_name_aiter_is_ours_for_our_models_alone():
    asked = {"SGLANG_EXTERNAL_MODEL_PACKAGE": "atom_plugin.sglang.models"}
    assert probe(ON_ROCM, **asked) == ["native", "ours"]
