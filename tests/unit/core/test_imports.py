"""Who may import whom, in the files and in a fresh interpreter."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

import atom_core

ROOT = Path(atom_core.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))


def imported(path: Path) -> set[str]:
    """Every module that a file imports anywhere, those for type checkers too."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            names.add(node.module)
    return names


def starts_with(names: set[str], *packages: str) -> set[str]:
    return {name for name in names if any(name == it or name.startswith(f"{it}.") for it in packages)}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_core_knows_no_framework_and_no_adapter(path):
    assert not starts_with(imported(path), "vllm", "sglang", "atom_plugin")


@pytest.mark.parametrize("path", sorted((ROOT / "models").glob("*.py")), ids=lambda path: path.name)
def test_models_import_no_vendor_package_and_no_implementation_of_a_kernel(path):
    names = imported(path)
    assert not starts_with(names, "aiter", "triton")
    assert not {name for name in names if name.endswith(("_kernel", ".reference"))}


@pytest.mark.parametrize("path", sorted((ROOT / "kernels").rglob("*.py")), ids=lambda path: str(path.relative_to(ROOT)))
def test_kernels_know_nothing_above_them(path):
    assert not starts_with(imported(path), "atom_core.models", "atom_core.layers", "atom_core.mixers")


def modules_after(code: str) -> set[str]:
    result = subprocess.run(
        [sys.executable, "-c", f"{code}\nimport sys\nprint(*sys.modules)"],
        env=os.environ.copy(),
        capture_output=True,
        text=True,
        check=True,
    )
    return set(result.stdout.split())


@pytest.mark.parametrize("module", ["atom_core", "atom_core.models", "atom_core.models.registry", "atom_core.quant"])
def test_asking_what_is_supported_imports_no_torch(module):
    assert not starts_with(modules_after(f"import {module}"), "torch", "triton", "transformers", "safetensors")


def test_running_a_model_imports_no_triton_kernel_and_no_transformers():
    loaded = modules_after(
        "import atom_core.standalone as it\n"
        "from atom_core.models.registry import DRAFTS, MODELS, load_draft_class, load_model_class\n"
        "for name in MODELS: load_model_class(name)\n"
        "for name in DRAFTS: load_draft_class(name)"
    )
    assert not starts_with(loaded, "aiter", "transformers", "vllm", "sglang")
    assert not {name for name in loaded if name.endswith("triton_kernel")}
