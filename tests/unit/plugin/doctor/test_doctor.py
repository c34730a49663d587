"""`atom-plugin doctor` as a user runs it, in environments made of metadata only."""

from __future__ import annotations

import pytest

from atom_plugin.doctor.environment import OURS
from tests.unit.plugin.installed import add_distribution, run_cli


@pytest.fixture
def site(tmp_path):
    """An environment that seems to have vLLM in a supported version."""
    folder = tmp_path / "site"
    add_distribution(folder, "vllm", "0.32.0+cpu")
    return folder


@pytest.fixture
def model(tiny_checkpoint):
    return str(tiny_checkpoint)


def test_all_well(site, model):
    result = run_cli("doctor", "--", "vllm", "serve", model, "--model-impl", "atom", site=site)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "0.32.0+cpu" in result.stdout
    assert all(value in result.stdout for value in OURS.values())
    assert "rms_norm" in result.stdout
    assert result.stdout.rstrip().endswith("vLLM will run the models of atom-plugin.")


def test_without_a_command(site):
    result = run_cli("doctor", site=site)
    assert result.returncode == 0, result.stdout + result.stderr


def test_the_separator_may_be_left_out(site, model):
    result = run_cli("doctor", "vllm", "serve", model, "--model-impl", "atmo", site=site)
    assert result.returncode == 1
    assert "--model-impl 'atmo'" in result.stdout


def test_each_finding_says_what_happens_and_what_to_do(site, model):
    command = ("vllm", "serve", model, "--model-impl", "atmo")
    result = run_cli("doctor", "--", *command, site=site, VLLM_PLUGINS="other", VLLM_TARGET_DEVICE="cpu")
    assert result.returncode == 1
    assert result.stdout.count("What happens:") == result.stdout.count("What to do:") == 3
    assert "3 findings" in result.stdout


def test_variables_of_the_examined_command_count(site, model):
    result = run_cli("doctor", "--", "VLLM_PLUGINS=other", "vllm", "serve", model, "--model-impl", "atom", site=site)
    assert result.returncode == 1
    assert "VLLM_PLUGINS='other'" in result.stdout


def test_another_vllm(tmp_path):
    add_distribution(tmp_path, "vllm", "0.33.0")
    result = run_cli("doctor", site=tmp_path)
    assert result.returncode == 1
    assert "vllm 0.33.0 is installed, but atom-plugin" in result.stdout


def test_two_platform_plugins(site):
    (site / "other_platform.py").write_text("def register(): return 'other.Platform'\n")
    add_distribution(site, "other", "1.0", {"vllm.platform_plugins": {"other": "other_platform:register"}})
    result = run_cli("doctor", site=site)
    assert result.returncode == 1
    assert "another active platform plug-in, 'other'" in result.stdout


def test_a_model_elsewhere_is_not_examined(site):
    result = run_cli("doctor", "--", "vllm", "serve", "Qwen/Qwen3-8B", "--model-impl", "atom", site=site)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "Qwen/Qwen3-8B is not a folder on this machine" in result.stdout


def test_another_command_is_a_usage_error(site):
    result = run_cli("doctor", "--", "ls", site=site)
    assert result.returncode == 2
    assert "not the command of a vLLM server" in result.stderr
