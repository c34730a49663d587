"""Engines of SGLang in turn, and what they are asked: what runs in a process of the matrix.

    python sglang_engine.py CASES IMPL FOUND

CASES is a file of JSON, FOUND one to write a line of it for each to, IMPL "atom" or "native".
"""

from __future__ import annotations

import asyncio
import os
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from tests.flags.forked import run_each

PROMPTS = [
    "12 + 5 =",
    "The capital of France is the city of Paris, and",
    "b c d e",
    "Question: What is 3 plus 4?\nAnswer:",
]
SHAPE = {"device": "cpu", "dtype": "float32", "max_total_tokens": 8192, "mem_fraction_static": 0.6, "log_level": "info"}
GREEDY = {"temperature": 0.0, "max_new_tokens": 12}
LOGPROBS = {"return_logprob": True, "top_logprobs_num": 2, "logprob_start_len": 0}
#: Of what SGLang tells beside an answer.
META = (
    "finish_reason",
    "cached_tokens",
    "output_token_logprobs",
    "output_top_logprobs",
    "output_token_ids_logprobs",
    "input_token_logprobs",
    "input_top_logprobs",
    "hidden_states",
    "routed_experts",
)
#: What takes long to import: processes of engines have it.
IMPORTED = (
    *("sglang", "sglang.srt.entrypoints.engine", "sglang.srt.managers.scheduler"),
    *("sglang.srt.managers.detokenizer_manager", "sglang.srt.model_executor.model_runner"),
)
PACKAGE = "SGLANG_EXTERNAL_MODEL_PACKAGE"


def main() -> None:
    """Run them in turn."""
    given, impl, wanted = sys.argv[1:]
    if impl == "atom":
        os.environ[PACKAGE] = "atom_plugin.sglang.models"
    for name in IMPORTED:
        import_module(name)
    run_each(Path(given), Path(wanted), lambda case: {"ours": impl == "atom", "answers": run(case)})


def run(case: dict[str, Any]) -> list[Any]:
    """What the engine answers."""
    import sglang

    engine = sglang.Engine(model_path=case["model"], **{**SHAPE, **case["options"]})
    try:
        return [ask(engine, dict(parameters)) for parameters in case["asks"]]
    finally:
        engine.shutdown()


def ask(engine: Any, parameters: dict[str, Any]) -> Any:
    """One request of each prompt; what is no sampling parameter says how it is made."""
    how, prompts = parameters.pop("how", "generate"), parameters.pop("prompts", PROMPTS)
    repeat, arguments = parameters.pop("repeat", 1), {**LOGPROBS, **parameters.pop("request", {})}
    sampling = {**GREEDY, **parameters}
    if how == "one at a time":
        return [_output(engine.generate(it, sampling, **arguments)) for it in prompts]
    if how == "tokens":
        ids = [list(range(70 + at, 90 + 3 * at)) for at in range(len(prompts))]
        return [_output(it) for it in engine.generate(input_ids=ids, sampling_params=sampling, **arguments)]
    if how.startswith("pause"):
        paused = _paused(engine, prompts, sampling, arguments, how.removeprefix("pause, "))
        return [_output(it) for it in engine.loop.run_until_complete(paused)]
    if how == "session":
        return _session(engine, sampling)
    for _ in range(repeat):
        outputs = engine.generate(prompts, sampling, **arguments)
    return [_output(it) for it in outputs]


async def _paused(
    engine: Any, prompts: list[str], sampling: dict[str, Any], arguments: dict[str, Any], mode: str
) -> Any:
    """What is answered where generation pauses in the middle."""
    from sglang.srt.managers.io_struct import ContinueGenerationReqInput, PauseGenerationReqInput

    running = asyncio.ensure_future(engine.async_generate(prompts, sampling, **arguments))
    await asyncio.sleep(0.2)
    await engine.tokenizer_manager.pause_generation(PauseGenerationReqInput(mode=mode))
    await asyncio.sleep(0.2)
    await engine.tokenizer_manager.continue_generation(ContinueGenerationReqInput(torch_empty_cache=False))
    return await running


def _session(engine: Any, sampling: dict[str, Any]) -> Any:
    session = engine.open_session(capacity_of_str_len=1000)
    found, rid = [], None
    for ids in ([70, 71, 72, 73], [80, 81], [90]):
        at = {"id": session, "rid": rid, "offset": -1, "replace": False}
        output = engine.generate(input_ids=ids, sampling_params=sampling, session_params=at)
        rid = output["meta_info"]["id"]
        found.append(_output(output))
    engine.close_session(session)
    return found


def _output(output: Any) -> dict[str, Any]:
    meta = {name: output["meta_info"][name] for name in META if output["meta_info"].get(name) is not None}
    return {"text": output.get("text"), "tokens": output["output_ids"], **meta}


if __name__ == "__main__":
    main()
