"""Both runs of each case."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.flags.case import Case, Verdict, judge
from tests.integration.mixtures import make_drafting
from tests.integration.preloaded import COMMON, preloaded, run_script
from tests.integration.questions import checkpoint
from tests.integration.server import SglangServer

#: Seconds that a process may take before its first engine, and for each.
FIRST, DEADLINE = 60.0, 30.0
#: What SGLang imports and takes long; forked processes have it. Its own modules follow in the first process.
MODULES = (*COMMON, "flashinfer", "torchvision", "torchaudio", "scipy.stats", "aiohttp", "IPython")
#: SGLang's own models take one op of vLLM's on a CPU.
STAND_INS = Path(__file__).parents[1] / "integration" / "sglang" / "stand_ins"
ENVIRON = {
    "vllm": {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_ALLOW_INSECURE_SERIALIZATION": "1", "OMP_NUM_THREADS": "1"},
    "sglang": {**SglangServer.on_a_cpu, "OMP_NUM_THREADS": "1"},
}
NATIVE = {"vllm": "vllm", "sglang": "native"}


def judged(framework: str, cases: Sequence[Case], folder: Path) -> Iterator[tuple[Case, Verdict]]:
    """Each case with how it went; checkpoints that are made go to ``folder``."""
    # What is refused need not be run natively.
    beside = [case for case in cases if case.refused is None]
    with preloaded(MODULES) if framework == "sglang" else contextlib.nullcontext():
        native = dict(zip(beside, run(framework, beside, NATIVE[framework], folder), strict=True))
        ours = run(framework, cases, "atom", folder)
    for case, ran in zip(cases, ours, strict=True):
        yield case, judge(case, native.get(case, {}), ran)


def run(framework: str, cases: Sequence[Case], impl: str, folder: Path) -> list[dict[str, Any]]:
    """What the engine of each case answered. One process runs many; where one ends it, the next begins another."""
    found: dict[Case, dict[str, Any]] = {}
    for environ in dict.fromkeys(tuple(sorted(case.environ.items())) for case in cases):
        left = [case for case in cases if tuple(sorted(case.environ.items())) == environ]
        while left:
            some, end = _run_some(framework, left, impl, folder, dict(environ))
            found |= zip(left, some, strict=False)
            if len(some) < len(left):
                found[left[len(some)]] = {"error": end}
            left = left[len(some) + 1 :]
    return [found[case] for case in cases]


def _run_some(
    framework: str, cases: Sequence[Case], impl: str, folder: Path, environ: dict[str, str]
) -> tuple[list[dict[str, Any]], str]:
    """The answers of as many as one process comes to, and how it ended."""
    given, wanted = folder / "cases.json", folder / "found.jsonl"
    given.write_text(json.dumps([_placed({**it.as_json(), "model": f"@{it.family}"}, folder) for it in cases]))
    wanted.write_text("")
    script = Path(__file__).with_name(f"{framework}_engine.py")
    if impl == "native":
        environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(STAND_INS), os.environ.get("PYTHONPATH"))))
    arguments, deadline = [str(given), impl, str(wanted)], FIRST + DEADLINE * len(cases)
    try:
        finished = run_script(script, arguments, {**ENVIRON[framework], **environ}, deadline)
        end = f"exit code {finished.returncode}: {_last_line(finished.log)}"
    except AssertionError as error:
        end = f"no end within {deadline:.0f} s: {str(error)[-300:]}"
    return [json.loads(line) for line in wanted.read_text().splitlines()], end


def _placed(value: Any, folder: Path) -> Any:
    """``value`` with "@family" in it replaced by the folder of that checkpoint."""
    if isinstance(value, str) and value.startswith("@"):
        return _drafting(folder) if value == "@drafting" else checkpoint(value[1:])
    if isinstance(value, dict):
        return {name: _placed(it, folder) for name, it in value.items()}
    return [_placed(it, folder) for it in value] if isinstance(value, list | tuple) else value


def _drafting(folder: Path) -> str:
    place = folder / "drafting"
    if not place.exists():
        place.mkdir()
        make_drafting(place)
    return str(place)


def _last_line(log: str) -> str:
    lines = [line for line in log.splitlines() if line.strip()]
    return next((line for line in reversed(lines) if "Error" in line), lines[-1] if lines else "nothing was printed")
