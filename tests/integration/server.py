"""A real server in a process group of its own, for tests and the demonstration: `vllm serve`, or SGLang's.

Where `tests.integration.preloaded` has a process with heavy packages, a server is forked off that one and runs what the
command would run. Some are started by their commands there too: see `Server`.
"""

from __future__ import annotations

import contextlib
import random
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import ClassVar

from tests.integration.preloaded import start_python
from tests.integration.processes import Process, end_group, end_of, merged_environ, start_group

# vLLM's logger puts process, level, time and place before each line, also before each line of a table.
_LOG_LINE = re.compile(r"(?:\([^)]*\) )?[A-Z]+ \d\d-\d\d \d\d:\d\d:\d\d \[(?P<place>[^]]*)\] (?P<text>.*)")


class ServerFailed(Exception):
    """The server ended, or was not ready in time; the message holds the end of its log, and what failed first in it."""

    def __init__(self, reason: str, log: str, returncode: int | None) -> None:
        super().__init__(f"{reason}. The end of its log:\n{end_of(log)}")
        self.log = log
        self.returncode = returncode


# SGLang's puts the time, and the rank where there are several, before the first line of a message alone.
_SGLANG_LINE = re.compile(r"\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d[^]]*\] (?P<text>.*)")


class Server(ABC):
    """`with VllmServer(model, "--model-impl", "atom") as server: ...` serves `model` until the block ends.

    Args:
        model: a folder or a name, as for the framework's command.
        flags: further arguments of that command.
        environ: variables to set beside those of this process; one that maps to None is taken away.
        deadline: seconds until it must be ready. A first start compiles, and two cores are slow.
        by_command: start the command as users do, also where modules are preloaded. A forked server takes tens of
            seconds less of a core, but has packages that were imported before it had its variables, and forks processes
            that the framework would spawn. So the server that most tests of a framework share is started by its
            command, and so are those whose PYTHONPATH changes what a new interpreter imports or finds installed.

    Raises:
        ServerFailed: on entering, when it ends or is not ready in time.
    """

    def __init__(
        self,
        model: str | Path,
        *flags: str,
        environ: Mapping[str, str | None] | None = None,
        deadline: float = 300.0,
        by_command: bool = False,
    ) -> None:
        self.model = str(model)
        self.by_command = by_command
        self.flags = flags
        self.deadline = deadline
        self.port = free_port()
        self.environ = merged_environ({**self.defaults, **(environ or {})})
        self._log = tempfile.NamedTemporaryFile(prefix="server-", suffix=".log")  # noqa: SIM115
        self._process: Process | None = None

    #: Variables that the framework needs on a CPU.
    defaults: ClassVar[Mapping[str, str]] = {}

    @property
    @abstractmethod
    def command(self) -> list[str]:
        """The command line, in the running interpreter's environment."""

    @abstractmethod
    def startup_report(self) -> list[str]:
        """The lines of the table in which a model that was built says what runs."""

    @property
    def url(self) -> str:
        """Where it answers."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def log(self) -> str:
        """What it has printed until now."""
        return Path(self._log.name).read_text(errors="replace")

    @property
    def returncode(self) -> int | None:
        """Its exit code; None before it has started and while it runs."""
        return None if self._process is None else self._process.poll()

    @property
    def leader(self) -> int:
        """The process that leads its group, once it has started."""
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        """Start it without waiting."""
        start = start_group if self.by_command else start_python
        self._process = start(self.command, self.environ, self._log)

    def wait_until_ready(self) -> None:
        """Wait for `/health`."""
        assert self._process is not None
        end = time.monotonic() + self.deadline
        while not self._is_healthy():
            returncode = self._process.poll()
            if returncode is not None:
                raise ServerFailed(f"The server ended with exit code {returncode}", self.log, returncode)
            if time.monotonic() > end:
                raise ServerFailed(f"The server was not ready after {self.deadline:.0f} s", self.log, None)
            time.sleep(0.2)

    def stop(self) -> None:
        """End it and every process it started; its log stays readable."""
        if self._process is not None:
            end_group(self._process)

    def get(self, path: str) -> str:
        """The body of the answer to a GET of `path`."""
        with urllib.request.urlopen(f"{self.url}{path}", timeout=30) as answer:
            body: bytes = answer.read()
        return body.decode()

    def metric(self, name: str, label: str = "") -> float:
        """The sum of a metric's samples, of those alone whose labels contain `label`; 0 where there is none yet."""
        samples = re.findall(rf"^{re.escape(name)}(?:\{{(.*)\}})? (\S+)$", self.get("/metrics"), re.MULTILINE)
        return sum(float(value) for labels, value in samples if label in labels)

    def wait_for(self, condition: Callable[[], bool], what: str, deadline: float = 30.0) -> None:
        """Poll `condition` until it holds.

        Raises:
            AssertionError: it still does not after `deadline` seconds; the message names `what` was waited for.
        """
        end = time.monotonic() + deadline
        while not condition():
            assert time.monotonic() < end, f"waited {deadline:.0f} s in vain for: {what}"
            time.sleep(0.1)

    def __enter__(self) -> Server:
        self.start()
        try:
            self.wait_until_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and self._process is not None:
            # A server that ends under a test says why in its log alone; it may close its connections before it is gone.
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = self._process.wait(2)
                error.add_note(f"The server ended with exit code {code}. The end of its log:\n{end_of(self.log)}")
        self.stop()

    def _is_healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            return False


class VllmServer(Server):
    """`vllm serve` on a CPU."""

    #: Room for some ten thousand tokens of the small models: a gigabyte takes long to fill with zeros.
    cache: ClassVar[Sequence[str]] = ("--kv-cache-memory-bytes", str(256 * 2**20))

    @property
    def command(self) -> list[str]:
        """See :class:`Server`."""
        place = ("--host", "127.0.0.1", "--port", str(self.port))
        return [vllm_command(), "serve", self.model, *place, *self.cache, *self.flags]

    def startup_report(self) -> list[str]:
        """See :class:`Server`."""
        lines = [match for line in self.log.splitlines() if (match := _LOG_LINE.match(line))]
        places = {line["place"] for line in lines if line["text"].startswith("atom-plugin serves")}
        return [line["text"] for line in lines if line["place"] in places]


class SglangServer(Server):
    """SGLang's `launch_server` on a CPU, with our models unless `environ` takes the variable away."""

    on_a_cpu: ClassVar[Mapping[str, str]] = {
        # With several ranks there is no GPU's communication library to look for.
        "SGLANG_NCCL_SO_PATH": "/nonexistent",
        # Ranks compare what is free of one memory, each at a moment of its own, while others come and go.
        "SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK": "0",
        # Threads that wait for each other at each small step stand still where anything else wants a core.
        "OMP_NUM_THREADS": "1",
    }
    defaults: ClassVar[Mapping[str, str]] = {"SGLANG_EXTERNAL_MODEL_PACKAGE": "atom_plugin.sglang.models", **on_a_cpu}

    #: Where it runs.
    device: ClassVar[Sequence[str]] = ("--device", "cpu")
    #: Of all that is free, a pool takes half a minute to fill with zeros.
    cache: ClassVar[Sequence[str]] = ("--max-total-tokens", "65536")

    @property
    def command(self) -> list[str]:
        """See :class:`Server`."""
        launch = [sys.executable, "-m", "sglang.launch_server", "--model-path", self.model, *self.device]
        return [*launch, "--host", "127.0.0.1", "--port", str(self.port), *self.cache, *self.flags]

    def startup_report(self) -> list[str]:
        """See :class:`Server`."""
        report: list[str] = []
        for line in self.log.splitlines():
            match = _SGLANG_LINE.match(line)
            if match and match["text"].startswith("atom-plugin serves"):
                report = [match["text"]]
            elif report and line.startswith("  "):
                report.append(line)
            elif report:
                break
        return report


def vllm_command() -> str:
    """The command `vllm` of the running interpreter's environment."""
    beside = Path(sys.executable).with_name("vllm")
    # Where the interpreter is the system's, its commands may lie elsewhere.
    return str(beside) if beside.exists() else shutil.which("vllm") or "vllm"


def free_port() -> int:
    """One that nobody listens on, and that no connection is given: a server binds it only when its model is loaded."""
    return free_ports(1)


def free_ports(count: int) -> int:
    """The first of `count` that nobody listens on, below those that the system gives to connections of any process.

    For a server that works out others from the one it is told, and listens on them when its processes are connected.
    """
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    for _ in range(1000):
        first = random.randrange(10000, lowest - count)  # two runs at once should not meet
        with contextlib.ExitStack() as opened, contextlib.suppress(OSError):
            for port in range(first, first + count):
                opened.enter_context(socket.socket()).bind(("127.0.0.1", port))
            return first
    raise AssertionError(f"there are no {count} ports in a row that nobody listens on")
