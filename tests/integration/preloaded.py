"""Processes that find heavy packages imported: they are forked off one that has done it.

Importing what vLLM and SGLang need takes ten to twenty seconds of a core, in each process of each engine. Here
it is done once, within `preloaded`; `run_script` then forks a process that runs a script as `python SCRIPT ARGUMENTS`
would, and `start_python` one that runs a script or a module beside others. Each has variables, PYTHONPATH and a
process group of its own. What it starts by multiprocessing is forked as well, where the framework would have spawned
it: environment, modules and plug-ins are those of its parent, as when it is spawned.

The frameworks' own modules read variables when they are imported. So a process that has them too, itself forked off
the first one, forks those alone whose variables are all its own, from the third one on: most tests ask for the same.
What only a new interpreter reads is not read here: `sitecustomize`, and variables like PYTHONUNBUFFERED. Nor is a
package found in PYTHONPATH in place of one that is imported already. In `/proc`, a forked process has the command line
of the one it is forked off.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import json
import multiprocessing
import os
import runpy
import select
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from importlib import import_module, invalidate_caches
from pathlib import Path
from typing import IO, Any

from tests.integration.processes import (
    Finished,
    Process,
    kill_group,
    merged_environ,
    ran_too_long,
    run_group,
    start_group,
    temporary_log,
)

#: What vLLM and SGLang both import.
COMMON = (
    "torch",
    "torch._inductor.compile_fx",
    "transformers",
    "transformers.processing_utils",
    "openai.types",
    "fastapi",
    "triton",
    "compressed_tensors.quantization",
    "xgrammar",
)
#: What each framework imports and takes long, but its own modules, which read variables.
MODULES = {
    "vllm": (*COMMON, "opentelemetry.sdk.trace.export"),
    "sglang": (*COMMON, "flashinfer", "torchvision", "torchaudio", "scipy.stats", "aiohttp", "IPython"),
}
#: Variables that the modules read when they are imported: a process with other values is forked off another one.
READ = ("TRITON_INTERPRET", "TRITON_BACKENDS_IN_TREE", "HF_HOME", "HF_HUB_OFFLINE", "OMP_NUM_THREADS")


class Preloaded:
    """The process that has imported `modules`, with `environ`; a module that is not there is left out."""

    def __init__(self, modules: Sequence[str], environ: Mapping[str, str]) -> None:
        self._asked = threading.Lock()
        self.forked: list[Forked | PreloadedToo] = []
        self._asks, self._answers = self._begin(modules, environ)

    def _begin(self, modules: Sequence[str], environ: Mapping[str, str]) -> tuple[IO[bytes], IO[bytes]]:
        """Start it; what it is asked by, and what it answers by."""
        command = [sys.executable, "-m", "tests.integration.preloaded", *modules]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        # In a process group of its own: who interrupts the tests still has processes ended, of which it tells the ends.
        self._process = subprocess.Popen(command, **pipes, env=environ, start_new_session=True)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        return self._process.stdin, self._process.stdout

    @property
    def is_idle(self) -> bool:
        """Whether all that it has forked have been found ended."""
        self.forked = [it for it in self.forked if it.returncode is None]
        return not self.forked

    def end(self) -> None:
        """There is no more to start; what was started has ended."""
        self._process.communicate()

    def start(self, arguments: Sequence[str], environ: Mapping[str, str], log: str) -> Forked:
        """Start `python ARGUMENTS`; see :func:`start_python`."""
        start = {"arguments": list(arguments), "environ": dict(environ), "log": log, "folder": str(Path.cwd())}
        forked = Forked(self, self.ask({"start": start}), arguments)
        self.forked.append(forked)
        return forked

    def run(self, script: Path, arguments: Sequence[str], environ: Mapping[str, str], deadline: float) -> Finished:
        """See :func:`run_script`; `environ` is all there is."""
        with temporary_log() as log:
            process = self.start([str(script), *arguments], environ, log.name)
            try:
                process.wait(deadline)
            except subprocess.TimeoutExpired:
                raise ran_too_long(str(script), deadline, log.name) from None
            finally:
                kill_group(process.pid)
                returncode = process.wait()
            return Finished(returncode, Path(log.name).read_text(errors="replace"))

    def ask(self, what: dict[str, Any]) -> int:
        """What the process answers to one line of JSON."""
        with self._asked:
            self._asks.write(json.dumps(what).encode() + b"\n")
            self._asks.flush()
            return self._answer()

    def _answer(self) -> int:
        return int(self._answers.readline())


class PreloadedToo(Preloaded):
    """One that is forked off another one, `first`, whose modules it has as well."""

    def __init__(self, first: Preloaded, modules: Sequence[str], environ: Mapping[str, str]) -> None:
        self.returncode: int | None = None
        """None until it has ended."""
        self._first = first
        super().__init__(modules, environ)
        first.forked.append(self)

    def _begin(self, modules: Sequence[str], environ: Mapping[str, str]) -> tuple[IO[bytes], IO[bytes]]:
        with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as listening:
            place = str(Path(folder, "socket"))
            listening.bind(place)
            listening.listen()
            listening.settimeout(CONNECTS_WITHIN)
            self._pid = self._first.ask({"too": {"modules": [*modules], "environ": dict(environ), "place": place}})
            connection, _ = listening.accept()
        with connection:  # what is made of it keeps it open
            return connection.makefile("wb"), connection.makefile("rb")

    def end(self) -> None:
        """See :meth:`Preloaded.end`."""
        for file in (self._asks, self._answers):
            with contextlib.suppress(OSError):  # it may have ended by itself
                file.close()
        self.returncode = self._first.ask({"ended": self._pid})


class Forked:
    """One process that a `Preloaded` has forked, with what is used here of `subprocess.Popen`."""

    def __init__(self, preloaded: Preloaded, pid: int, arguments: Sequence[str]) -> None:
        self.pid, self.args = pid, ["python", *arguments]
        self.returncode: int | None = None
        """None until `poll` or `wait` has found it ended."""
        self._preloaded, self._waiting = preloaded, threading.Lock()
        # Whoever forked it can alone ask for its exit code, and its number is its own until then. It has not, so this
        # is the right process, even if it has ended already.
        self._ends = os.pidfd_open(pid)

    def poll(self) -> int | None:
        """Its exit code; None while it runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code, once it has ended.

        Raises:
            subprocess.TimeoutExpired: it has not after `timeout` seconds.
        """
        # Two threads that ask at once must not both have it told: it is told once.
        with self._waiting:
            if self.returncode is None:
                if not select.select([self._ends], [], [], timeout)[0]:
                    raise subprocess.TimeoutExpired(self.args, timeout or 0)
                self.returncode = self._preloaded.ask({"ended": self.pid})
                os.close(self._ends)
            return self.returncode


#: Within :func:`preloaded`, what starts a `Preloaded` for an environment, or finds it.
_START: ContextVar[Callable[[Mapping[str, str]], Preloaded] | None] = ContextVar("preloaded", default=None)


@contextmanager
def preloaded(modules: Sequence[str], own: Sequence[str] = ()) -> Iterator[None]:
    """Within, :func:`run_script` and :func:`start_python` start processes that have these modules already.

    They end before the block does.

    Args:
        modules: those that read no variables but :data:`READ`.
        own: a framework's, which read others.
    """
    sources = _Sources(modules, own)
    token = _START.set(sources.of)
    try:
        yield
    finally:
        _START.reset(token)
        sources.end()


#: Processes at a time that have a framework's modules, which take some memory.
MOST_WITH_OWN = 2
#: And those without, beside the first one.
MOST_OTHERS = 2
#: Seconds in which a process that is forked off is there.
CONNECTS_WITHIN = 120.0
#: The start with the same variables from which on one pays, which takes as long as a start without.
PAYS_FROM = 3


class _Sources:
    """The processes that others are forked off."""

    def __init__(self, modules: Sequence[str], own: Sequence[str]) -> None:
        self.modules, self.own = modules, own
        self.common: dict[tuple[str | None, ...], Preloaded] = {}
        """By what their modules read."""
        self.with_own: dict[frozenset[tuple[str, str]], Preloaded] = {}
        """By all variables."""
        self.asked: Counter[frozenset[tuple[str, str]]] = Counter()

    def of(self, environ: Mapping[str, str]) -> Preloaded:
        """What a process with these variables is forked off."""
        everything = frozenset(environ.items())
        self.asked[everything] += 1
        return self._with_own(everything, environ) or self._common(environ)

    def _common(self, environ: Mapping[str, str]) -> Preloaded:
        # What else PYTHONPATH names there is for one process, and others are forked off the same one. But Triton looks
        # there for backends that are not its own.
        path = environ if "TRITON_BACKENDS_IN_TREE" in environ else os.environ
        variables = {**environ, "PYTHONPATH": path.get("PYTHONPATH", "")}
        read = tuple(variables.get(name) for name in (*READ, "PYTHONPATH"))
        if read not in self.common:
            # Most tests ask for the like of the first one, and few for the like of any other.
            _, *others = self.common or [None]
            if len(others) >= MOST_OTHERS and (idle := [it for it in others if self.common[it].is_idle]):
                self.common.pop(idle[0]).end()
            self.common[read] = Preloaded(self.modules, variables)
        return self.common[read]

    def _with_own(self, everything: frozenset[tuple[str, str]], environ: Mapping[str, str]) -> Preloaded | None:
        """One that has the framework's modules; None: there is none, and others are asked for more often."""
        if everything in self.with_own or not self.own or self.asked[everything] < PAYS_FROM:
            return self.with_own.get(everything)
        if len(self.with_own) >= MOST_WITH_OWN:
            rarest = min(self.with_own, key=lambda it: self.asked[it])
            if self.asked[rarest] >= self.asked[everything] or not self.with_own[rarest].is_idle:
                return None
            self.with_own.pop(rarest).end()
        self.with_own[everything] = PreloadedToo(self._common(environ), self.own, environ)
        return self.with_own[everything]

    def end(self) -> None:
        """All of them."""
        for process in (*self.with_own.values(), *self.common.values()):
            process.end()


def is_preloaded() -> bool:
    """Whether this is within :func:`preloaded`."""
    return _START.get() is not None


def run_script(script: Path, arguments: Sequence[str], environ: Mapping[str, str | None], deadline: float) -> Finished:
    """Run `python SCRIPT ARGUMENTS` to its end, with `environ` beside the variables of this process.

    Raises:
        AssertionError: it has not ended after `deadline` seconds.
    """
    start = _START.get()
    if start is None:
        return run_group([sys.executable, str(script), *arguments], environ, deadline)
    merged = _alike(merged_environ(environ))
    return start(merged).run(script, arguments, merged, deadline)


def start_python(command: Sequence[str], environ: Mapping[str, str], log: IO[bytes]) -> Process:
    """Start `command` as `start_group` does, and go on.

    Args:
        command: this interpreter with a script or `-m` and a module, or a script that is a command itself.
        environ: all of its variables.
        log: a file with a name, for what its group prints.
    """
    start = _START.get()
    if start is None:
        return start_group(command, environ, log)
    environ = _alike(environ)
    arguments = command[1:] if command[0] == sys.executable else command
    return start(environ).start(arguments, environ, log.name)


def _alike(environ: Mapping[str, str]) -> dict[str, str]:
    """Variables without the one that is another in each test."""
    return {name: value for name, value in environ.items() if name != "PYTEST_CURRENT_TEST"}


def main() -> None:
    """Import the arguments, then serve what comes by standard input: start a process, or tell how one has ended."""
    given = dict(os.environ)
    _import(sys.argv[1:])
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    mine = {str(Path.cwd()), *os.environ.get("PYTHONPATH", "").split(os.pathsep)}
    _serve(sys.stdin, answers, [place for place in sys.path if place and place not in mine], given)


def _import(modules: Sequence[str]) -> None:
    for name in modules:
        try:
            import_module(name)
        except ImportError as error:
            print(f"{name} is not imported beforehand: {error}", file=sys.stderr)  # noqa: T201
    if os.environ.get("TRITON_INTERPRET") == "1":
        import_module("tests.quick_interpreter").install()
    # Half a million objects, which the frameworks would have looked through half a dozen times for each engine.
    gc.collect()
    gc.freeze()


def _serve(asks: IO[str], answers: IO[str], installed: list[str], given: dict[str, str]) -> None:
    """Do what each line asks for; in a process that it forks, this never returns."""
    for line in asks:
        asked = json.loads(line)
        if "ended" in asked:
            # It has, so this does not wait; or it is about to.
            print(os.waitstatus_to_exitcode(os.waitpid(asked["ended"], 0)[1]), file=answers)
            continue
        if not os.fork():
            # Whoever asked may end the group as soon as there is an answer. So there is a group by then.
            os.setsid()
            print(os.getpid(), file=answers)
            answers.close()
            if asks is not sys.stdin:  # which is replaced
                asks.close()
            if "too" in asked:
                _preload_too(**asked["too"], installed=installed)
            _be(**asked["start"], given=given, installed=installed)


def _preload_too(modules: list[str], environ: dict[str, str], place: str, installed: list[str]) -> None:
    """Import more, with other variables, and serve what comes by a socket, to its end."""
    code = 1
    try:
        _put(os.open(os.devnull, os.O_RDONLY), 0)
        os.environ.clear()
        os.environ.update(environ)
        _search([str(Path.cwd()), *environ.get("PYTHONPATH", "").split(os.pathsep), *installed])
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(place)
        with (
            os.fdopen(os.dup(connection.fileno())) as asks,
            os.fdopen(connection.detach(), "w", buffering=1) as answers,
        ):
            _import(modules)
            _serve(asks, answers, installed, environ)
        code = 0
    except BaseException:  # noqa: BLE001 - as the interpreter would
        traceback.print_exc()
    finally:
        os._exit(code)


def _be(
    arguments: list[str], environ: dict[str, str], log: str, folder: str, given: dict[str, str], installed: list[str]
) -> None:
    """Be `python ARGUMENTS`, to its end."""
    code = 1
    try:
        os.chdir(folder)
        _put(os.open(os.devnull, os.O_RDONLY), 0)
        _put(os.open(log, os.O_WRONLY | os.O_APPEND), 1)
        os.dup2(1, 2)
        if environ != given:  # else they are there, and what modules have set when they were imported
            os.environ.clear()
            os.environ.update(environ)
        _fork_in_place_of_spawning()
        places = environ.get("PYTHONPATH", "").split(os.pathsep)
        if arguments[0] == "-m":
            module, sys.argv = arguments[1], arguments[1:]
            _search([folder, *places, *installed])
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        else:
            script, sys.argv = arguments[0], arguments
            _search([str(Path(script).parent), *places, *installed])
            runpy.run_path(script, run_name="__main__")
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
        if not isinstance(end.code, int | None):
            print(end.code, file=sys.stderr)  # noqa: T201
    except BaseException:  # noqa: BLE001 - as the interpreter would
        traceback.print_exc()
    finally:
        try:
            # As the interpreter does at its end: threads that are no daemons end, then the rest is done.
            threading._shutdown()  # type: ignore[attr-defined]
            atexit._run_exitfuncs()
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(code)


def _put(opened: int, place: int) -> None:
    """Have a file under another number."""
    os.dup2(opened, place)
    os.close(opened)


def _search(places: Iterable[str]) -> None:
    """Have modules looked for in these places, in this order."""
    sys.path[:] = dict.fromkeys(place for place in places if place)
    invalidate_caches()


def _fork_in_place_of_spawning() -> None:
    fork = multiprocessing.get_context("fork")
    multiprocessing.set_start_method("fork", force=True)
    for module in (multiprocessing, multiprocessing.context._default_context):  # type: ignore[attr-defined]
        module.get_context = lambda method=None: fork
        module.set_start_method = lambda method, force=False: None


if __name__ == "__main__":
    main()
