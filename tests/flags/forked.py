"""Cases in turn, each in a process that is forked off one that has imported the framework."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

#: Seconds that a case may take.
DEADLINE = 90.0


def run_each(cases: Path, found: Path, run: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Append what ``run`` returns of each case of a file to another, a line of JSON each.

    Where it raises, or its process ends otherwise, the line has an ``error``.
    """
    gc.collect()
    gc.freeze()  # or each child would copy the pages that it looks through
    for case in json.loads(cases.read_text()):
        mine = found.with_suffix(".one")
        mine.unlink(missing_ok=True)
        child = os.fork()
        if not child:
            os.setsid()
            _be(case, mine, run)
        end = _end_of(child)
        with found.open("a") as lines:
            lines.write((mine.read_text() if mine.exists() else json.dumps({"error": end})) + "\n")


def _be(case: dict[str, Any], mine: Path, run: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Run the case and end."""
    try:
        try:
            ran = run(case)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever a user would read
            traceback.print_exc()
            ran = {"error": said(error)}
        mine.write_text(json.dumps(ran))
    finally:
        os._exit(0)


def _end_of(child: int) -> str:
    """Wait for a process, end what it has left, and say how it ended."""
    last = time.monotonic() + DEADLINE
    while time.monotonic() < last:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            break
        time.sleep(0.02)
    else:
        status = -1
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    if status == -1:
        os.waitpid(child, 0)
        return f"no end within {DEADLINE:.0f} s"
    return f"its process ended by itself, exit code {os.waitstatus_to_exitcode(status)}; the log says why"


def said(error: BaseException) -> str:
    """What of an error a user reads last: pydantic puts words of its own around it."""
    text = str(error)
    if type(error).__name__ == "ValidationError":
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        marked = [line for line in lines if line.startswith(("Value error, ", "Assertion failed, "))]
        return " ".join(marked or lines[:3]).removeprefix("Value error, ").partition(" [type=")[0]
    return text if isinstance(error, ValueError) else f"{type(error).__name__}: {text}"
