"""Processes that find heavy packages imported: they are forked off one that has done it.

Importing what vLLM and SGLang need takes ten to twenty seconds of a core, in each process of each engine. Here
it is done once, within `preloaded`; `run_script` then forks a process that runs a script as `python SCRIPT ARGUMENTS`
would, with variables, PYTHONPATH and a process group of its own. What that starts by multiprocessing is forked as well,
where the framework would have spawned it: environment, modules and plug-ins are those of its parent, as when it is
spawned.

The frameworks' own modules are not imported beforehand: they read variables when they are. Servers, which tests start
by their own commands, have nothing of this.
"""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import runpy
import select
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from importlib import import_module, invalidate_caches
from pathlib import Path
from typing import Any

from tests.integration.processes import Finished, kill_group, merged_environ, ran_too_long, run_group, temporary_log

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
#: Variables that the modules read when they are imported: a process with other values is forked off another one.
READ = ("TRITON_INTERPRET", "TRITON_BACKENDS_IN_TREE", "HF_HOME", "HF_HUB_OFFLINE")


class Preloaded:
    """The process that has imported `modules`, with `environ`; a module that is not there is left out."""

    def __init__(self, modules: Sequence[str], environ: Mapping[str, str]) -> None:
        command = [sys.executable, "-m", "tests.integration.preloaded", *modules]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        # Without a buffer: a line in there is one that `select` does not know of.
        self._process = subprocess.Popen(command, **pipes, env=environ, bufsize=0)

    def end(self) -> None:
        """There is no more to run."""
        self._process.communicate()

    def run(self, script: Path, arguments: Sequence[str], environ: Mapping[str, str], deadline: float) -> Finished:
        """See :func:`run_script`; `environ` is all there is."""
        with temporary_log() as log:
            self._tell({"script": str(script), "arguments": list(arguments), "environ": environ, "log": log.name})
            leader = self._answer()
            try:
                if not select.select([self._process.stdout], [], [], deadline)[0]:
                    raise ran_too_long(str(script), deadline, log.name)
            finally:
                kill_group(leader)
                returncode = self._answer()
            return Finished(returncode, Path(log.name).read_text(errors="replace"))

    def _tell(self, what: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(what).encode() + b"\n")

    def _answer(self) -> int:
        assert self._process.stdout is not None
        return int(self._process.stdout.readline())


#: Within :func:`preloaded`, what starts a `Preloaded` for an environment, or finds it.
_START: ContextVar[Callable[[Mapping[str, str]], Preloaded] | None] = ContextVar("preloaded", default=None)


@contextmanager
def preloaded(modules: Sequence[str]) -> Iterator[None]:
    """Within, :func:`run_script` runs processes that have these modules already."""
    running: dict[tuple[str | None, ...], Preloaded] = {}

    def start(environ: Mapping[str, str]) -> Preloaded:
        read = tuple(environ.get(name) for name in READ)
        if read not in running:
            running[read] = Preloaded(modules, environ)
        return running[read]

    token = _START.set(start)
    try:
        yield
    finally:
        _START.reset(token)
        for process in running.values():
            process.end()


def run_script(script: Path, arguments: Sequence[str], environ: Mapping[str, str | None], deadline: float) -> Finished:
    """Run `python SCRIPT ARGUMENTS` to its end, with `environ` beside the variables of this process.

    Raises:
        AssertionError: it has not ended after `deadline` seconds.
    """
    start = _START.get()
    if start is None:
        return run_group([sys.executable, str(script), *arguments], environ, deadline)
    merged = merged_environ(environ)
    return start(merged).run(script, arguments, merged, deadline)


def main() -> None:
    """Import the arguments, then serve what comes by standard input, one process at a time."""
    for name in sys.argv[1:]:
        try:
            import_module(name)
        except ImportError as error:
            print(f"{name} is not imported beforehand: {error}", file=sys.stderr)  # noqa: T201
    # Half a million objects, which the frameworks would have looked through half a dozen times for each engine.
    gc.collect()
    gc.freeze()
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    for line in sys.stdin:
        child = os.fork()
        if not child:
            answers.close()
            _be(**json.loads(line))
        print(child, file=answers)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), file=answers)


def _be(script: str, arguments: list[str], environ: dict[str, str], log: str) -> None:
    """Run the script and end."""
    code = 1
    try:
        os.setsid()
        for place, opened in ((0, os.open(os.devnull, os.O_RDONLY)), (1, os.open(log, os.O_WRONLY | os.O_APPEND))):
            os.dup2(opened, place)
            os.close(opened)
        os.dup2(1, 2)
        os.environ.clear()
        os.environ.update(environ)
        _search(Path(script).parent, environ.get("PYTHONPATH", "").split(os.pathsep))
        _fork_in_place_of_spawning()
        sys.argv = [script, *arguments]
        runpy.run_path(script, run_name="__main__")
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)  # noqa: T201
    except BaseException:  # noqa: BLE001 - as the interpreter would
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _search(folder: Path, places: Iterable[str]) -> None:
    """Have modules looked for where `python` would look that was started with these places in PYTHONPATH."""
    first = dict.fromkeys([str(folder), *(place for place in places if place)])
    sys.path[:] = [*first, *(place for place in sys.path if place and place not in first)]
    invalidate_caches()


def _fork_in_place_of_spawning() -> None:
    fork = multiprocessing.get_context("fork")
    multiprocessing.set_start_method("fork", force=True)
    for module in (multiprocessing, multiprocessing.context._default_context):  # type: ignore[attr-defined]
        module.get_context = lambda method=None: fork
        module.set_start_method = lambda method, force=False: None


if __name__ == "__main__":
    main()
