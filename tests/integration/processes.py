"""Child processes in groups of their own, so that whatever they start ends with them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Protocol

STOP_SECONDS = 20.0


class Process(Protocol):
    """What is used here of `subprocess.Popen`, which a forked process has too."""

    @property
    def pid(self) -> int:
        """Its number, and that of the group which it leads."""

    def poll(self) -> int | None:
        """Its exit code; None while it runs."""

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code, or `subprocess.TimeoutExpired`."""


def merged_environ(changes: Mapping[str, str | None]) -> dict[str, str]:
    """The environment of this process with `changes`; a variable that maps to None is taken away."""
    merged: dict[str, str | None] = {**os.environ, **changes}
    return {name: value for name, value in merged.items() if value is not None}


def start_group(
    command: Sequence[str], environ: Mapping[str, str], log: IO[bytes], folder: Path | None = None
) -> subprocess.Popen[bytes]:
    """Start `command` as the leader of a process group, in `folder`; all that the group prints goes to `log`."""
    return subprocess.Popen(
        command,
        cwd=folder,
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def kill_group(leader: int) -> None:
    """Kill whatever is left of a group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)


def temporary_log() -> tempfile._TemporaryFileWrapper[bytes]:
    """A file for what a group prints, which is gone when it is closed."""
    return tempfile.NamedTemporaryFile(prefix="atom-test-", suffix=".log")


def living_of_group(leader: int) -> list[int]:
    """The processes of a group that have not ended; one that has may wait for its parent to be told."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        # A process may end while it is looked at.
        with contextlib.suppress(OSError):
            state, _, group = path.read_text().rpartition(")")[2].split()[:3]
            if int(group) == leader and state not in "ZX":
                found.append(int(path.parent.name))
    return found


def end_group(leader: Process) -> None:
    """End a group: politely at first, and in any case whatever its leader has left behind, until none of it lives.

    What holds a GPU's memory frees it as it ends, and the next server needs it.
    """
    for signal_number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(leader.pid, signal_number)
        except ProcessLookupError:
            break
        try:
            leader.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            continue
    end = time.monotonic() + STOP_SECONDS
    while living_of_group(leader.pid) and time.monotonic() < end:
        time.sleep(0.05)


@dataclass(frozen=True)
class Finished:
    """A process that has ended by itself."""

    returncode: int
    log: str

    def tail(self) -> str:
        """See :func:`end_of`."""
        return end_of(self.log)


def end_of(log: str, lines: int = 60) -> str:
    """The last ``lines``, behind as many from the first traceback on where that is further up.

    What failed first is the cause; processes that waited for it say at the end that it has failed.
    """
    printed = log.splitlines()
    last = max(0, len(printed) - lines)
    first = next(
        (index for index, line in enumerate(printed[:last]) if "Traceback (most recent call last)" in line), last
    )
    begun = printed[first : min(first + lines, last)]
    left_out = ["..."] if first + lines < last else []
    return "\n".join([*begun, *left_out, *printed[last:]])


def ran_too_long(what: str, deadline: float, log: str) -> AssertionError:
    """The error of a process that has not ended after `deadline` seconds, with the end of its log."""
    finished = Finished(-1, Path(log).read_text(errors="replace"))
    return AssertionError(f"{what} ran longer than {deadline:.0f} s:\n{finished.tail()}")


def run_group(
    command: Sequence[str], environ: Mapping[str, str | None], deadline: float, folder: Path | None = None
) -> Finished:
    """Run `command` to its end in `folder`, with `environ` beside the variables of this process.

    Raises:
        AssertionError: it has not ended after `deadline` seconds.
    """
    with temporary_log() as file:
        process = start_group(command, merged_environ(environ), file, folder)
        try:
            process.wait(deadline)
        except subprocess.TimeoutExpired:
            raise ran_too_long(command[0], deadline, file.name) from None
        finally:
            end_group(process)
        return Finished(process.returncode, Path(file.name).read_text(errors="replace"))
