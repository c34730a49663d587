"""The entry point, in the real SGLang: it only adds, and adds once."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.sglang, pytest.mark.smoke]

PROBE = """
import json, sys
from sglang.srt.plugins import load_plugins

load_plugins()
light = {"atom_plugin.sglang.causal_lm", "sglang.srt.models.registry"}.isdisjoint(sys.modules)
from atom_plugin.sglang import register
from sglang.srt.arg_groups import model_override_base
from sglang.srt.server_args import ATTENTION_BACKEND_CHOICES

register()
register()
ours = {
    name: sum(function.__module__.startswith("atom_plugin") for function in functions)
    for name, functions in model_override_base._MODEL_OVERRIDE_FNS.items()
}
from sglang.srt.models.registry import ModelRegistry

print(json.dumps({
    "light": light,
    "choices": ATTENTION_BACKEND_CHOICES.count("atom"),
    "overrides": {name: count for name, count in ours.items() if count},
    "qwen3": ModelRegistry.resolve_model_cls(["Qwen3ForCausalLM"])[0].__module__,
}))
"""


def probe(**environ):
    result = subprocess.run(
        [sys.executable, "-c", PROBE], env={**os.environ, **environ}, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


def test_the_backend_and_our_architectures_are_known_once_and_models_stay_sglangs_own():
    from atom_core.models.registry import supported_architectures

    found = probe()
    assert found["light"]
    assert found["choices"] == 1
    assert found["overrides"] == dict.fromkeys(supported_architectures(), 1)
    assert found["qwen3"] == "sglang.srt.models.qwen3"


def test_the_variable_makes_the_models_ours():
    assert (
        probe(SGLANG_EXTERNAL_MODEL_PACKAGE="atom_plugin.sglang.models")["qwen3"] == "atom_plugin.sglang.models.dense"
    )
