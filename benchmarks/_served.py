"""An engine in its own process that takes requests over pipes, one JSON line each, and sleeps in between."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Message = dict[str, Any]


class Served:
    """The process, from outside. `command` gets `--replies`, the pipe that :func:`answer` writes to."""

    def __init__(self, name: str, command: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
        self.name = name
        read, write = os.pipe()
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - it lives as long as the process
        self.process = subprocess.Popen(
            [*command, "--replies", str(write)],
            stdin=subprocess.PIPE,
            stdout=self.log,
            stderr=self.log,
            pass_fds=[write],
            text=True,
            env=None if environment is None else dict(environment),
        )
        os.close(write)
        self.replies = os.fdopen(read)

    def next(self) -> Message:
        """What it says next.

        Raises:
            SystemExit: it ended; what it has printed goes to stderr.
        """
        line = self.replies.readline()
        if not line:
            code = self.process.wait()
            sys.stderr.write(self.printed()[-20000:])
            raise SystemExit(f"the {self.name} engine failed with exit code {code}")
        found: Message = json.loads(line)
        return found

    def ask(self, question: Message) -> Message:
        """Its answer."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(question) + "\n")
        self.process.stdin.flush()
        return self.next()

    def printed(self) -> str:
        """All that it has printed; the process has ended."""
        self.log.seek(0)
        return self.log.read()

    def end(self) -> None:
        """Nothing more is asked; it may have something left to say."""
        assert self.process.stdin is not None
        self.process.stdin.close()


def answer(replies: int, ready: Message, respond: Callable[[Message], Message]) -> Callable[[Message], None]:
    """Be such a process, whose engine has started: say so, and answer until nothing more is asked.

    Args:
        replies: the pipe.
        ready: what to say first.
        respond: answers a question.

    Returns:
        Says what is left to say.
    """
    pipe = os.fdopen(replies, "w", buffering=1)

    def say(message: Message) -> None:
        pipe.write(json.dumps(message) + "\n")

    say(ready)
    for line in sys.stdin:
        say(respond(json.loads(line)))
    return say
