"""The two entry points, in the real vLLM: our platform is active, the stock registry is untouched."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.vllm

PROBE = """
import json
from atom_plugin.vllm import register_models, register_platform
from vllm.platforms import current_platform
from vllm import ModelRegistry

before = {name: str(entry) for name, entry in ModelRegistry.models.items() if not name.startswith("Atom")}
register_models()
register_models()
after = {name: str(entry) for name, entry in ModelRegistry.models.items() if not name.startswith("Atom")}
platform = type(current_platform)
print(json.dumps({
    "path": register_platform(),
    "again": register_platform(),
    "platform": f"{platform.__module__}.{platform.__qualname__}",
    "is_cpu": current_platform.is_cpu(),
    "ours": sorted(name for name in ModelRegistry.models if name.startswith("Atom")),
    "stock_unchanged": before == after,
}))
"""


def probe(**environ):
    result = subprocess.run(
        [sys.executable, "-c", PROBE], env={**os.environ, **environ}, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1]), result.stdout + result.stderr


@pytest.mark.smoke
def test_our_platform_is_active_and_our_models_are_known():
    from atom_core.models.registry import DRAFTS, supported_architectures

    found, _ = probe()
    assert found["path"] == found["again"] == found["platform"] == "atom_plugin.vllm.AtomCpuPlatform"
    assert found["is_cpu"]
    drafts = {name for _, name in DRAFTS.values()}  # those of Qwen3.5 serve its multimodal checkpoints too
    assert found["ours"] == sorted(f"Atom{name}" for name in [*supported_architectures(), *drafts])
    assert found["stock_unchanged"]


def test_switched_off_it_is_as_if_it_were_not_installed():
    found, log = probe(ATOM_DISABLE_VLLM_PLUGIN="1")
    assert found["path"] is None
    assert found["platform"] == "vllm.platforms.cpu.CpuPlatform"
    assert found["ours"] == []
    assert "atom-plugin is not used, and with --model-impl atom vLLM serves its own model" in log


def test_where_vllm_takes_its_own_platform_one_warning_says_so():
    found, log = probe(VLLM_TARGET_DEVICE="cpu")
    assert found["platform"] == "vllm.platforms.cpu.CpuPlatform"
    assert "vLLM's platform is CpuPlatform and not ours (VLLM_TARGET_DEVICE=cpu is one cause)" in log


@pytest.mark.parametrize("environ", [{"ATOM_KERNEL": "x"}, {"ATOM_DISABLE_VLLM_PLUGIN": "maybe"}])
def test_a_wrong_setting_is_only_logged_for_who_did_not_ask_for_us(environ):
    found, log = probe(**environ)
    assert found["platform"] == "atom_plugin.vllm.AtomCpuPlatform"
    (name,) = environ
    assert name in log
    assert "`--model-impl atom` will refuse to start" in log
