"""Distributions that exist only as metadata, and runs of the command line that see them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
from typer.testing import CliRunner

from atom_plugin.cli import app

SOURCES = Path(__file__).parents[3] / "src"


def add_distribution(
    site: Path,
    name: str,
    version: str,
    entry_points: Mapping[str, Mapping[str, str]] | None = None,
    requires: tuple[str, ...] = (),
) -> None:
    """Write the `.dist-info` of a distribution into the folder `site`."""
    folder = site / f"{name.replace('-', '_')}-{version}.dist-info"
    folder.mkdir(parents=True)
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
    (folder / "METADATA").write_text("\n".join([*lines, *(f"Requires-Dist: {item}" for item in requires), ""]))
    groups = [
        "\n".join([f"[{group}]", *(f"{key} = {value}" for key, value in points.items()), ""])
        for group, points in (entry_points or {}).items()
    ]
    (folder / "entry_points.txt").write_text("\n".join(groups))


def only(site: Path) -> list[str]:
    """A `sys.path` on which `site` is the one folder of installed distributions."""
    return [str(site), *(path for path in sys.path if "site-packages" not in path)]


def run_python(*arguments: str, site: Path | None = None, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run this interpreter on this checkout, seeing `site` before all else and none of the outer settings."""
    outer = ("ATOM_", "SGLANG_", "VLLM_")
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(outer)}
    paths = [str(path) for path in (site, SOURCES) if path is not None]
    return subprocess.run(
        [sys.executable, *arguments],
        env={**inherited, "PYTHONPATH": os.pathsep.join(paths), **environ},
        capture_output=True,
        text=True,
        check=False,
        timeout=500,  # torch and transformers are slow to import on a machine that is busy with other tests
    )


def run_cli(*arguments: str, site: Path | None = None, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run `atom-plugin ARGUMENTS`; see `run_python`."""
    return run_python("-c", "from atom_plugin.cli import main; main()", *arguments, site=site, **environ)


def assert_both_refuse(
    command: str,
    main: Callable[[Sequence[str]], int],
    arguments: Sequence[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """`atom-plugin bench COMMAND ARGUMENTS` and its module's own `main`, here, both say the message and exit with 1."""
    found = CliRunner().invoke(app, ["bench", command, *arguments])
    assert found.exit_code == 1, found.output
    assert main(arguments) == 1
    for said in (found.stderr, capsys.readouterr().err):
        assert message in said
        assert "Traceback" not in said
