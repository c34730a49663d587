"""Importing an entry point's module costs nothing: vLLM does it in every process of every user."""

from __future__ import annotations

import pytest

from tests.unit.plugin.installed import run_python

HEAVY = ("torch", "vllm", "sglang", "pydantic", "transformers", "rich", "typer")


@pytest.mark.parametrize(
    "module",
    [
        "atom_plugin",
        "atom_plugin.vllm",
        "atom_plugin.sglang",
        "atom_plugin.common.settings",
        "atom_plugin.common.support",
        "atom_plugin.common.versions",
        "atom_plugin.doctor.command",
        "atom_plugin.doctor.environment",
        "atom_plugin.doctor.sglang",
    ],
)
def test_imports_nothing_heavy(module):
    result = run_python("-c", f"import sys, {module}; print(*(name for name in {HEAVY} if name in sys.modules))")
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == []


def test_the_command_line_starts_without_torch():
    """It has rich and typer; `--help` and tables of flags need no more."""
    result = run_python("-c", "import sys, atom_plugin.cli; print({'torch', 'vllm', 'sglang'} & set(sys.modules))")
    assert (result.returncode, result.stdout.strip()) == (0, "set()"), result.stderr


@pytest.mark.parametrize("function", ["register_platform", "register_models"])
def test_switched_off_not_even_vllm_is_imported(function):
    code = f"import sys; from atom_plugin.vllm import {function}; print({function}(), 'vllm' in sys.modules)"
    result = run_python("-c", code, ATOM_DISABLE_VLLM_PLUGIN="1")
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == ["None", "False"]
