"""Both runs of each case."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from tests.flags.case import Case, Verdict, judge
from tests.flags.forked import DEADLINE
from tests.integration.mixtures import make_drafting
from tests.integration.preloaded import MODULES, is_preloaded, preloaded, run_script
from tests.integration.questions import checkpoint
from tests.integration.server import SglangServer

#: SGLang's own models take one op of vLLM's on a CPU.
STAND_INS = Path(__file__).parents[1] / "integration" / "sglang" / "stand_ins"
ENVIRON = {
    "vllm": {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # the model's class is asked for by a function
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        # vLLM's sampler compiles how it counts log probabilities, in each engine for longer than all else takes.
        "TORCHDYNAMO_DISABLE": "1",
    },
    "sglang": {**SglangServer.on_a_cpu, "OMP_NUM_THREADS": "1"},
}
NATIVE = {"vllm": "vllm", "sglang": "native"}


def judged(framework: str, cases: Sequence[Case], folder: Path) -> Iterator[tuple[Case, Verdict]]:
    """Each case with how it went; checkpoints that are made go to ``folder``."""
    # What is refused need not be run natively.
    beside = [case for case in cases if case.refused is None]
    with nullcontext() if is_preloaded() else preloaded(MODULES[framework]):
        native = dict(zip(beside, run(framework, beside, NATIVE[framework], folder), strict=True))
        ours = run(framework, cases, "atom", folder)
    for case, ran in zip(cases, ours, strict=True):
        yield case, judge(case, native.get(case, {}), ran)


def run(framework: str, cases: Sequence[Case], impl: str, folder: Path) -> list[dict[str, Any]]:
    """What the engine of each case answered: a process for all that have the same variables."""
    found: dict[Case, dict[str, Any]] = {}
    for environ in dict.fromkeys(tuple(sorted(case.environ.items())) for case in cases):
        some = [case for case in cases if tuple(sorted(case.environ.items())) == environ]
        found |= zip(some, _run_some(framework, some, impl, folder, dict(environ)), strict=True)
    return [found[case] for case in cases]


def _run_some(
    framework: str, cases: Sequence[Case], impl: str, folder: Path, environ: dict[str, str]
) -> list[dict[str, Any]]:
    given, wanted = folder / "cases.json", folder / "found.jsonl"
    given.write_text(json.dumps([_placed({**it.as_json(), "model": f"@{it.family}"}, folder) for it in cases]))
    wanted.write_text("")
    script = Path(__file__).with_name(f"{framework}_engine.py")
    if impl == "native":
        environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(STAND_INS), os.environ.get("PYTHONPATH"))))
    variables = {**ENVIRON[framework], **environ}
    finished = run_script(script, [str(given), impl, str(wanted)], variables, (1 + len(cases)) * DEADLINE)
    assert finished.returncode == 0, f"exit code {finished.returncode}:\n{finished.tail()}"
    return [json.loads(line) for line in wanted.read_text().splitlines()]


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
