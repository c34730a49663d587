"""SGLang without a server: engines one after the other, each with a process and scheduler processes of its own.

`run` starts the processes; the rest of this file is what runs there.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

PACKAGE = "SGLANG_EXTERNAL_MODEL_PACKAGE"


@dataclass(frozen=True)
class Ask:
    """Prompts that go to an engine at once, and sampling parameters; greedy where nothing else is said."""

    prompts: Sequence[str] | Sequence[Sequence[int]]
    """Texts or tokens."""
    sampling: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of `Engine.generate`."""
    aborted: Sequence[str] | Sequence[Sequence[int]] = ()
    """Further prompts that run before these are sent, and are given up when the first of these has a few tokens."""


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


def drafting(count: int, **options: Any) -> dict[str, Any]:
    """`options`, and those by which layers of the checkpoint itself draft `count` tokens in a row."""
    return {
        "speculative_algorithm": "NEXTN",
        "speculative_num_steps": count,
        "speculative_eagle_topk": 1,
        "speculative_num_draft_tokens": count + 1,
        **options,
    }


def run(
    engines: Sequence[Engine], *, environ: Mapping[str, str | None] | None = None, deadline: float = 560.0
) -> list[Ran]:
    """Run `engines` in turn, each in a fresh process.

    Args:
        engines: what to run.
        environ: variables to set beside those of this process; one that maps to None is taken away.
        deadline: seconds for all of it.

    Raises:
        AssertionError: an engine failed, or the deadline has passed; the message holds the end of the log.
    """
    end = time.monotonic() + deadline
    return [_run(engine, environ or {}, end - time.monotonic()) for engine in engines]


def _run(engine: Engine, variables: Mapping[str, str | None], deadline: float) -> Ran:
    from tests.integration.preloaded import run_script
    from tests.integration.server import SglangServer

    with tempfile.TemporaryDirectory() as folder:
        given, wanted = Path(folder, "engine.json"), Path(folder, "answers.json")
        given.write_text(json.dumps(asdict(engine)))
        on_device = SglangServer.on_a_cpu if engine.options.get("device", "cpu") == "cpu" else {}
        package = "atom_plugin.sglang.models" if engine.ours else None
        environ = {PACKAGE: package, **on_device, **variables, **engine.environ}
        finished = run_script(Path(__file__), [str(given), str(wanted)], environ, deadline)
        assert finished.returncode == 0, f"exit code {finished.returncode}:\n{finished.tail()}"
        answers = json.loads(wanted.read_text())
    return Ran([[Answer(**answer) for answer in asked] for asked in answers], finished.log)


def main() -> None:
    """Run the engine of one JSON file and write what it answered to another."""
    given, wanted = map(Path, sys.argv[1:])
    wanted.write_text(json.dumps(_run_engine(**json.loads(given.read_text()))))


def _run_engine(
    model: str, asks: list[dict[str, Any]], options: dict[str, Any], **_: Any
) -> list[list[dict[str, Any]]]:
    import sglang

    # A stated pool: what is free while others start and end means nothing.
    pool = {"max_total_tokens": 196608, "mem_fraction_static": 0.6}
    engine = sglang.Engine(model_path=model, **{"device": "cpu", "log_level": "info", **pool, **options})
    try:
        return [_ask(engine, **ask) for ask in asks]
    finally:
        engine.shutdown()


def _ask(
    engine: Any,
    prompts: list[str] | list[list[int]],
    sampling: dict[str, Any],
    options: dict[str, Any],
    aborted: list[str] | list[list[int]],
) -> list[dict[str, Any]]:
    arguments = {
        _key(prompts[0]): prompts,
        "sampling_params": {"temperature": 0.0, "max_new_tokens": 32, **sampling},
        **options,
    }
    outputs = (
        engine.loop.run_until_complete(_beside(engine, aborted, arguments)) if aborted else engine.generate(**arguments)
    )
    return [
        {"text": output.get("text", ""), "tokens": output["output_ids"], "meta": output["meta_info"]}
        for output in outputs
    ]


def _key(prompt: str | list[int]) -> str:
    """The argument of `Engine.generate` that such a prompt goes to."""
    return "prompt" if isinstance(prompt, str) else "input_ids"


async def _beside(engine: Any, aborted: list[str] | list[list[int]], arguments: dict[str, Any]) -> list[dict[str, Any]]:
    """What `Engine.generate` answers while other requests run, which are given up; none of them ends by itself."""
    begun, is_time = [asyncio.Event() for _ in aborted], asyncio.Event()
    key = "prompt" if "prompt" in arguments else "input_ids"
    prompts = arguments[key]

    async def give_up(count: int) -> None:
        # With `ignore_eos` SGLang would keep room for all of it.
        sampling = {"temperature": 0.0, "max_new_tokens": 100, "min_new_tokens": 100}
        prompt, name = aborted[count], f"given-up-{count}"
        given = {_key(prompt): prompt, "sampling_params": sampling}
        async for part in await engine.async_generate(**given, stream=True, rid=name):
            begun[count].set()
            # Where SGLang puts the first one off for long, these must not end meanwhile.
            if is_time.is_set() or part["meta_info"]["completion_tokens"] > 60:
                engine.tokenizer_manager.abort_request(name)
            last = part
        assert last["meta_info"]["finish_reason"]["type"] == "abort"

    async def ask_first() -> list[dict[str, Any]]:
        async for part in await engine.async_generate(**{**arguments, key: prompts[0]}, stream=True):
            if part["meta_info"]["completion_tokens"] > 2:
                is_time.set()
            last = part
        is_time.set()
        return [last]

    others = [asyncio.create_task(give_up(count)) for count in range(len(aborted))]
    await asyncio.gather(*(it.wait() for it in begun))
    first, rest = await asyncio.gather(ask_first(), engine.async_generate(**{**arguments, key: prompts[1:]}))
    await asyncio.gather(*others)
    return [*first, *rest]


if __name__ == "__main__":
    main()
