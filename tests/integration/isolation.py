"""What the tests of both frameworks share that make this package unfit for a framework, which must not notice."""

from __future__ import annotations

import os
from pathlib import Path

from tests.unit.plugin.installed import add_distribution

BROKEN_IMPORTS = Path(__file__).with_name("broken_imports")
#: A range without any version that there is.
RANGE = ">=0.0.1,<0.0.2"


def before_all_else(*folders: Path) -> dict[str, str]:
    """A variable by which Python looks in `folders` first."""
    return {"PYTHONPATH": os.pathsep.join([*map(str, folders), os.environ.get("PYTHONPATH", "")])}


def of_another_framework(site: Path, framework: str) -> Path:
    """A folder with this package's metadata, as if it were made for versions of `framework` that are not here."""
    points = {
        "vllm.platform_plugins": {"atom": "atom_plugin.vllm:register_platform"},
        "vllm.general_plugins": {"atom": "atom_plugin.vllm:register_models"},
        "sglang.srt.plugins": {"atom": "atom_plugin.sglang:register"},
    }
    add_distribution(site, "atom-plugin", "9.9.9", points, (f'{framework}{RANGE}; extra == "{framework}"',))
    return site
