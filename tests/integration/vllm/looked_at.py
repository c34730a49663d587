"""An engine whose modules and weights are looked at by name: what runs in a process of `test_names.py`."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from typing import Any

from tests.integration.scripts import run_given

PROMPT = "12 + 5 ="


def _names(model: Any) -> list[str]:
    """By which parameters can be looked up, in the model and from its modules."""
    names = [name for name, _ in model.named_parameters()]
    assert all(model.get_parameter(name) is parameter for name, parameter in model.named_parameters())
    return names


def _watch(model: Any, names: Sequence[str]) -> None:
    """Count on each module how often it was called, and with how many rows."""
    for name in names:
        module = model.get_submodule(name)
        module.seen = []

        def hook(module: Any, inputs: Any, output: Any) -> None:
            first = output[0] if isinstance(output, tuple) and output[0] is not None else output
            module.seen.append(len(first[-1] if isinstance(first, tuple) else first))

        module.register_forward_hook(hook)


def _seen(model: Any, names: Sequence[str]) -> dict[str, int]:
    return {name: len(model.get_submodule(name).seen) for name in names}


def run_case(
    model: str, folder: str, options: dict[str, Any], watched: Sequence[str] = (), save: bool = False
) -> dict[str, Any]:
    """An engine, and what its calls lead to.

    Args:
        model: the checkpoint's folder.
        folder: where `save` puts a folder to start from.
        options: of the engine.
        watched: modules to put hooks on.
        save: have the weights saved by rank.
    """
    from functools import partial

    from vllm import LLM, SamplingParams

    shape = {"kv_cache_memory_bytes": 64 * 2**20, "max_model_len": 256, "enable_prefix_caching": False}
    llm = LLM(model, **{"model_impl": "atom", **shape, **options})

    def answer() -> Any:
        wanted = SamplingParams(temperature=0.0, max_tokens=8, logprobs=3, prompt_logprobs=1)
        (output,) = llm.generate([PROMPT], wanted, use_tqdm=False)
        of_prompt = [sorted((token, it.logprob) for token, it in (at or {}).items()) for at in output.prompt_logprobs]
        return [list(output.outputs[0].token_ids), of_prompt]

    found: dict[str, Any] = {"answer": answer(), "names": llm.apply_model(_names)[0]}
    if watched:
        llm.apply_model(partial(_watch, names=watched))
        answer()
        found["seen"] = llm.apply_model(partial(_seen, names=watched))[0]
    if save:
        shutil.copytree(model, folder, ignore=shutil.ignore_patterns("*.safetensors*"))
        llm.llm_engine.engine_core.save_sharded_state(path=folder)
    found["answer then"] = answer()
    return found


if __name__ == "__main__":
    run_given(run_case)
