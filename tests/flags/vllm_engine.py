"""Engines of vLLM in turn, and what they are asked: what runs in a process of the matrix.

    python vllm_engine.py CASES IMPL FOUND

CASES is a file of JSON, FOUND one to write a line of it for each to, IMPL as for `--model-impl`.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
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
SHAPE = {"dtype": "float32", "max_model_len": 512, "kv_cache_memory_bytes": 64 * 2**20}
#: What takes long to import, and reads no variable that a case sets.
IMPORTED = (
    *("vllm", "vllm.entrypoints.llm", "vllm.v1.engine.core", "vllm.v1.executor.uniproc_executor"),
    *(
        "vllm.v1.worker.cpu_worker",
        "vllm.model_executor.models.qwen3_moe",
        "vllm.v1.structured_output",
        "torch._dynamo",
    ),
)
GREEDY = {"temperature": 0.0, "max_tokens": 12, "logprobs": 3}


def main() -> None:
    """Run them in turn."""
    given, impl, wanted = sys.argv[1:]
    for name in IMPORTED:
        import_module(name)
    run_each(Path(given), Path(wanted), lambda case: run(case, impl))


def run(case: dict[str, Any], impl: str) -> dict[str, Any]:
    """What the engine answers."""
    from vllm import LLM

    # vLLM's own models are not compiled: that takes longer than all of the answers, of which it changes none.
    eager = {} if impl == "atom" else {"enforce_eager": True}
    options = {"model_impl": impl, "disable_log_stats": False, **SHAPE, **eager, **case["options"]}
    if any(parameters.get("how", "").startswith("pause") for parameters in case["asks"]):
        return asyncio.run(_paused(case, options))
    llm = LLM(case["model"], **options)
    ours = llm.apply_model(_class_name)[0].startswith("Atom")
    answers = [ask(llm, dict(parameters)) for parameters in case["asks"]]
    llm.llm_engine.engine_core.shutdown()
    return {"ours": ours, "answers": answers}


def _class_name(model: Any) -> str:
    return type(model).__name__


async def _paused(case: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """What an engine answers whose generation pauses in the middle: vLLM's asynchronous one alone does."""
    from vllm import AsyncEngineArgs, SamplingParams
    from vllm.v1.engine.async_llm import AsyncLLM

    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(case["model"], **options))
    ours = (await engine.collective_rpc(_class_of_models))[0].startswith("Atom")
    answers = []
    for parameters in map(dict, case["asks"]):
        mode = parameters.pop("how").removeprefix("pause, ")
        params = SamplingParams(**{**GREEDY, **parameters})
        begun = asyncio.Event()

        async def whole(at: int, params: Any = params, begun: asyncio.Event = begun) -> Any:
            outputs = [it async for it in _each(engine.generate(PROMPTS[at], params, f"{len(answers)}-{at}"), begun)]
            return outputs[-1]

        running = asyncio.gather(*map(whole, range(len(PROMPTS))))
        await begun.wait()
        await engine.pause_generation(mode=mode, clear_cache=False)
        paused = await engine.is_paused()
        await asyncio.sleep(0.2)
        await engine.resume_generation()
        answers.append([paused, [_output(output) for output in await running]])
    engine.shutdown()
    return {"ours": ours, "answers": answers}


async def _each(outputs: AsyncIterator[Any], begun: asyncio.Event) -> AsyncIterator[Any]:
    async for output in outputs:
        begun.set()
        yield output


def _class_of_models(worker: Any) -> str:
    return type(worker.model_runner.get_model()).__name__


def ask(llm: Any, parameters: dict[str, Any]) -> Any:
    """One request of each prompt; what is no sampling parameter says how it is made."""
    from vllm import SamplingParams
    from vllm.sampling_params import BeamSearchParams, StructuredOutputsParams

    how, prompts = parameters.pop("how", "generate"), parameters.pop("prompts", PROMPTS)
    repeat = parameters.pop("repeat", 1)
    arguments = {"priority": parameters.pop("priority")} if "priority" in parameters else {}
    if how == "beam":
        found = llm.beam_search([{"prompt": it} for it in prompts], BeamSearchParams(**parameters))
        return [[[it.tokens, float(it.cum_logprob)] for it in output.sequences] for output in found]
    if how == "tokens":
        prompts = [{"prompt_token_ids": list(range(70 + at, 90 + 3 * at))} for at in range(len(prompts))]
    if how == "embeddings":
        prompts = [{"prompt_embeds": it} for it in llm.apply_model(_embeddings)[0]]
    if how == "sleep":
        llm.sleep(1)
        llm.wake_up()
    if "structured" in parameters:
        parameters["structured_outputs"] = StructuredOutputsParams(**parameters.pop("structured"))
    if "logit_bias" in parameters:  # JSON has no numbers as keys
        parameters["logit_bias"] = {int(token): bias for token, bias in parameters["logit_bias"].items()}
    params = SamplingParams(**{**GREEDY, **parameters})
    for _ in range(repeat):
        outputs = llm.generate(prompts, params, use_tqdm=False, **arguments)
    return [_output(output) for output in outputs]


def _embeddings(model: Any) -> list[Any]:
    import torch

    ids = [torch.arange(70, 90), torch.arange(100, 113)]
    return [model.embed_input_ids(it).detach().clone() for it in ids]


def _output(output: Any) -> dict[str, Any]:
    return {
        "cached": output.num_cached_tokens,
        "prompt": [_by_token(entry) for entry in output.prompt_logprobs or ()],
        "completions": [
            {
                "text": it.text,
                "tokens": list(it.token_ids),
                "finish": [it.finish_reason, it.stop_reason],
                "logprobs": [_by_token(entry) for entry in it.logprobs or ()],
                "sum": it.cumulative_logprob,
            }
            for it in output.outputs
        ],
    }


def _by_token(entry: Any) -> dict[str, float]:
    return {str(token): float(found.logprob) for token, found in (entry or {}).items()}


if __name__ == "__main__":
    main()
