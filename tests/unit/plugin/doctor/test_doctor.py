"""`atom-plugin doctor` as a user runs it, in environments made of metadata only."""

from __future__ import annotations

import pytest

from atom_plugin.doctor.environment import OURS
from atom_plugin.doctor.framework import FRAMEWORKS
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
    add_distribution(tmp_path, "vllm", "0.34.0")
    result = run_cli("doctor", site=tmp_path)
    assert result.returncode == 1
    assert "vllm 0.34.0 is installed, but atom-plugin" in result.stdout


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
    assert "not the command of a vLLM or SGLang server" in result.stderr


ASKED = "SGLANG_EXTERNAL_MODEL_PACKAGE=atom_plugin.sglang.models"


def add_ours(site):
    """This package as it is installed for both frameworks."""
    points = {group: {"atom": value} for framework in FRAMEWORKS for group, value in framework.entry_points.items()}
    requires = ('vllm<0.34,>=0.30; extra == "vllm"', 'sglang<0.6,>=0.5.23; extra == "sglang"')
    add_distribution(site, "atom-plugin", "0.1.0", points, requires)


@pytest.fixture
def sglang_site(tmp_path):
    """An environment that seems to have SGLang in a supported version, and no vLLM."""
    folder = tmp_path / "sglang_site"
    add_distribution(folder, "sglang", "0.5.23")
    add_ours(folder)
    return folder


@pytest.mark.parametrize(
    "server", ["sglang serve", "sglang serve --model-path", "python -m sglang.launch_server --model-path"]
)
def test_all_well_with_sglang(sglang_site, model, server):
    result = run_cli("doctor", "--", ASKED, *server.split(), model, "--device", "cpu", site=sglang_site)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "0.5.23" in result.stdout
    assert result.stdout.rstrip().endswith(f"All well: with {ASKED}, SGLang will run the models of atom-plugin.")
    assert "vLLM will" not in result.stdout


def test_without_a_command_only_the_installed_framework_is_examined(sglang_site):
    result = run_cli("doctor", site=sglang_site, VLLM_PLUGINS="other", VLLM_TARGET_DEVICE="cpu")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "SGLang will run the models" in result.stdout


def test_sglang_findings_say_what_happens_and_what_to_do(sglang_site, model):
    command = ("python", "-m", "sglang.launch_server", "--model-path", model, "--enable-lora")
    result = run_cli("doctor", "--", *command, site=sglang_site, SGLANG_PLUGINS="other")
    assert result.returncode == 1
    assert result.stdout.count("What happens:") == result.stdout.count("What to do:") == 3
    assert "is set neither in the environment nor in the command" in result.stdout
    assert "3 findings" in result.stdout


def test_an_unsupported_checkpoint_under_sglang(sglang_site, tmp_path):
    (tmp_path / "config.json").write_text('{"architectures": ["GPT2LMHeadModel"]}')
    result = run_cli("doctor", "--", ASKED, "sglang", "serve", str(tmp_path), site=sglang_site)
    assert result.returncode == 1
    assert "'GPT2LMHeadModel' is not supported" in result.stdout


def test_with_both_frameworks_each_is_examined_unless_a_command_names_one(sglang_site):
    add_distribution(sglang_site, "vllm", "0.32.0+cpu")
    result = run_cli("doctor", site=sglang_site, SGLANG_PLUGINS="other", VLLM_PLUGINS="other")
    assert "2 findings" in result.stdout
    command = ("vllm", "serve", "M", "--model-impl", "atom")
    result = run_cli("doctor", "--", *command, site=sglang_site, SGLANG_PLUGINS="other")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "vLLM will run the models" in result.stdout
    assert "SGLang will" not in result.stdout


def test_a_command_of_a_framework_that_is_not_installed(sglang_site):
    result = run_cli("doctor", "--", "vllm", "serve", "M", "--model-impl", "atom", site=sglang_site)
    assert result.returncode == 1
    assert "vLLM is not installed in this environment." in result.stdout
