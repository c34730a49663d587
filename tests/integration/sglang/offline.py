"""SGLang without a server: engines one after the other, each with scheduler processes of its own.

`run` starts a process that runs a list of engines; the rest of this file is what runs there.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

PACKAGE = "SGLANG_EXTERNAL_MODEL_PACKAGE"
# Parts the log of one engine from the next one's.
MARK = "==== next engine ===="


@dataclass(frozen=True)
class Ask:
    """Prompts that go to an engine at once, and sampling parameters; greedy where nothing else is said."""

    prompts: Sequence[str]
    sampling: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of `Engine.generate`."""


@dataclass(frozen=True)
class Engine:
    """One `sglang.Engine`, and what it is asked in turn.

    Args:
        model: the checkpoint's folder.
        ours: whether the environment variable names our package.
        asks: the prompts.
        options: further arguments of `sglang.Engine`.
        environ: variables set while it lives.
    """

    model: str
    ours: bool
    asks: Sequence[Ask]
    options: Mapping[str, Any] = field(default_factory=dict)
    environ: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Answer:
    """What came back for one prompt."""

    text: str
    tokens: list[int]
    meta: dict[str, Any]


@dataclass(frozen=True)
class Ran:
    """What an engine did."""

    answers: list[list[Answer]]
    """One list for each `Ask`."""
    log: str
    """All that its processes have printed."""


def run(
    engines: Sequence[Engine], *, environ: Mapping[str, str | None] | None = None, deadline: float = 560.0
) -> list[Ran]:
    """Run `engines` in turn in one fresh process.

    Args:
        engines: what to run.
        environ: variables to set beside those of this process; one that maps to None is taken away.
        deadline: seconds for all of it.

    Raises:
        AssertionError: an engine failed, or the deadline has passed; the message holds the end of the log.
    """
    from tests.integration.processes import run_group
    from tests.integration.server import SglangServer

    with tempfile.TemporaryDirectory() as folder:
        given, wanted = Path(folder, "engines.json"), Path(folder, "ran.json")
        given.write_text(json.dumps([asdict(engine) for engine in engines]))
        variables = {PACKAGE: None, **SglangServer.on_a_cpu, **(environ or {})}
        finished = run_group([sys.executable, __file__, str(given), str(wanted)], variables, deadline)
        assert finished.returncode == 0, f"exit code {finished.returncode}:\n{finished.tail()}"
        logs = finished.log.split(MARK)[1:]
        return [
            Ran([[Answer(**answer) for answer in asked] for asked in answers], log)
            for answers, log in zip(json.loads(wanted.read_text()), logs, strict=True)
        ]


def main() -> None:
    """Run the engines of one JSON file and write what they answered to another."""
    given, wanted = map(Path, sys.argv[1:])
    wanted.write_text(json.dumps([_run_engine(**engine) for engine in json.loads(given.read_text())]))


def _run_engine(
    model: str, ours: bool, asks: list[dict[str, Any]], options: dict[str, Any], environ: dict[str, str]
) -> list[list[dict[str, Any]]]:
    import sglang

    print(MARK, flush=True)  # noqa: T201
    variables = {**environ, **({PACKAGE: "atom_plugin.sglang.models"} if ours else {})}
    os.environ.update(variables)
    # A stated pool: what is free while others start and end means nothing.
    pool = {"max_total_tokens": 196608, "mem_fraction_static": 0.6}
    engine = sglang.Engine(model_path=model, **{"device": "cpu", "log_level": "info", **pool, **options})
    try:
        return [_ask(engine, **ask) for ask in asks]
    finally:
        engine.shutdown()
        for name in variables:
            del os.environ[name]


def _ask(engine: Any, prompts: list[str], sampling: dict[str, Any], options: dict[str, Any]) -> list[dict[str, Any]]:
    outputs = engine.generate(
        prompt=prompts, sampling_params={"temperature": 0.0, "max_new_tokens": 32, **sampling}, **options
    )
    return [{"text": output["text"], "tokens": output["output_ids"], "meta": output["meta_info"]} for output in outputs]


if __name__ == "__main__":
    main()
