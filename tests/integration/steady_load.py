"""The benchmark of steady load as a test of either framework: a small model on this CPU, and few, short requests."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks._steady_frameworks import FIGURES
from tests.integration.processes import run_group
from tests.integration.questions import checkpoint

#: Seconds for two servers and at most six clients, each of which imports its framework.
DEADLINE = 1200


def run_steady(
    framework: str, file: Path, server_flags: str, environ: Mapping[str, str | None], *more: str
) -> dict[str, Any]:
    """What `benchmarks.steady` has measured with four requests at once, and at the rates of `more`.

    A further number of requests at once would run nothing new: which of several is the best is tested without a model.

    Args:
        framework: the benchmark's first argument.
        file: where it writes its figures.
        server_flags: what servers need on a CPU.
        environ: beside the variables of this process.
        more: further arguments.
    """
    command = [sys.executable, "-m", "benchmarks.steady", framework, "--model", str(checkpoint("qwen3"))]
    command += ["--lengths", "64/16", "--concurrency", "4", "--turns", "1", "--json", str(file)]
    finished = run_group([*command, f"--server-flags={server_flags}", *more], environ, DEADLINE)
    assert finished.returncode == 0, finished.tail()
    found: dict[str, Any] = json.loads(file.read_text())
    assert f"| load | {' | '.join(FIGURES)} |" in finished.log
    assert {row["figure"].partition(": ")[2] for row in found["rows"]} == set(FIGURES)
    for row in found["rows"]:
        assert row["native"]["median"] > 0
        assert row["atom"]["median"] > 0
    native, atom = found["servers"]
    assert (native["implementation"], atom["implementation"]) == ("native", "atom")
    # Each is the model that it should be.
    assert native["startup_report"] == []
    assert atom["startup_report"][0] == f"atom-plugin serves {checkpoint('qwen3')}"
    return found
