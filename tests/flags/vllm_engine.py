"""Engines of vLLM in turn, and what they are asked: what runs in a process of the matrix.

    python vllm_engine.py CASES IMPL FOUND

CASES is a file of JSON, FOUND one to write a line of it for each to, IMPL as for `--model-impl`.
"""

from __future__ import annotations

import gc
import json
import sys
import traceback
from pathlib import Path
from typing import Any

PROMPTS = [
    "12 + 5 =",
    "The capital of France is the city of Paris, and",
    "b c d e",
    "Question: What is 3 plus 4?\nAnswer:",
]
SHAPE = {"dtype": "float32", "max_model_len": 512, "kv_cache_memory_bytes": 64 * 2**20}
GREEDY = {"temperature": 0.0, "max_tokens": 12, "logprobs": 3}


def main() -> None:
    """Run them in turn."""
    given, impl, wanted = sys.argv[1:]
    # What is there by now stays: collecting what an engine leaves behind, ten times an engine, need not look there.
    gc.unfreeze = lambda: None
    gc.freeze()
    with Path(wanted).open("a", buffering=1) as found:
        for case in json.loads(Path(given).read_text()):
            try:
                ran = run(case, impl)
            except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever a user would read
                traceback.print_exc()
                ran = {"error": said(error)}
            found.write(json.dumps(ran) + "\n")


def said(error: BaseException) -> str:
    """What of an error a user reads last: pydantic puts words of its own around it."""
    text = str(error)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if type(error).__name__ == "ValidationError":
        marked = [line for line in lines if line.startswith(("Value error, ", "Assertion failed, "))]
        text = " ".join(marked or lines[:3])
        text = text.removeprefix("Value error, ").partition(" [type=")[0]
    return f"{type(error).__name__}: {text}" if not isinstance(error, ValueError) else text


def run(case: dict[str, Any], impl: str) -> dict[str, Any]:
    """What the engine answers."""
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory

    llm = None
    try:
        llm = LLM(case["model"], **{"model_impl": impl, "disable_log_stats": False, **SHAPE, **case["options"]})
        ours = llm.apply_model(_class_name)[0].startswith("Atom")
        return {"ours": ours, "answers": [ask(llm, dict(parameters)) for parameters in case["asks"]]}
    finally:
        if llm is not None:
            llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()
        cleanup_dist_env_and_memory()


def _class_name(model: Any) -> str:
    return type(model).__name__


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
