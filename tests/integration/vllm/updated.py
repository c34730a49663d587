"""Engines whose weights are changed while they run, beside fresh ones: what runs in a process of `test_updates.py`.

Log probabilities of a few tokens behind prompts, and of the prompts', say which weights a model has, bit for bit.
"""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

PROMPTS = ["12 + 5 =", "The capital of France is the city of Paris, and", "b c d e"]
#: Tensors of a trainer's bucket: few enough that layers come in several.
BUCKET = 5


def _tensors(folder: str) -> list[tuple[str, Any]]:
    from safetensors.torch import load_file

    return [it for path in sorted(Path(folder).glob("*.safetensors")) for it in load_file(path).items()]


def _buckets(folder: str) -> list[list[tuple[str, Any]]]:
    tensors = _tensors(folder)
    return [tensors[first : first + BUCKET] for first in range(0, len(tensors), BUCKET)]


def _install_engine(worker: Any) -> None:
    """Give a worker an engine of weight transfers, from folders: vLLM's own ones ask for a GPU."""
    from vllm.config.weight_transfer import WeightTransferConfig
    from vllm.distributed.weight_transfer.base import WeightTransferEngine
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    class FolderEngine(WeightTransferEngine):  # type: ignore[type-arg]
        def init_transfer_engine(self, init_info: Any) -> None: ...

        def start_weight_update(self) -> None:
            initialize_layerwise_reload(self.model)

        def finish_weight_update(self) -> None:
            finalize_layerwise_reload(self.model, self.model_config)

        def update_weights(self, update_info: dict[str, Any]) -> None:
            self.receive_weights(update_info)

        def receive_weights(self, update_info: Any) -> None:
            wanted = update_info["names"]
            tensors = dict(_tensors(update_info["folder"]))
            cut = update_info.get("cut")
            self.model.load_weights([(name, tensors[name][:-1] if name == cut else tensors[name]) for name in wanted])

        def shutdown(self) -> None: ...

    worker = getattr(worker, "worker", worker)  # what is handed over stands before it
    worker.weight_transfer_engine = FolderEngine(
        WeightTransferConfig(backend="folder"), worker.vllm_config, worker.device, worker.model_runner.get_model()
    )


def _load_parts(worker: Any, folder: str) -> None:
    model = worker.model_runner.get_model()
    for bucket in _buckets(folder):
        model.load_weights(bucket)


def _why_not_ready(worker: Any) -> str:
    try:
        worker.model_runner.get_model().weights.check_ready()
    except RuntimeError as error:
        return str(error)
    return ""


def _reload_stream(worker: Any, folder: str) -> None:
    worker.reload_weights(weights_iterator=iter(_tensors(folder)))


class Updating:
    """One engine, and the calls."""

    def __init__(self, folder: str, options: dict[str, Any]) -> None:
        from vllm import LLM

        shape = {"kv_cache_memory_bytes": 64 * 2**20, "max_model_len": 256, "enable_prefix_caching": False}
        self.llm = LLM(folder, model_impl="atom", disable_log_stats=False, **{**shape, **options})

    def answers(self) -> list[Any]:
        """What says which weights it has, as JSON has it."""
        found: list[Any] = json.loads(json.dumps(self._answers()))
        return found

    def _answers(self) -> list[Any]:
        from vllm import SamplingParams

        drafting = self.llm.llm_engine.vllm_config.speculative_config is not None
        wanted = {"max_tokens": 24 if drafting else 8, "logprobs": 5, "prompt_logprobs": None if drafting else 1}
        outputs = self.llm.generate(PROMPTS, SamplingParams(temperature=0.0, **wanted), use_tqdm=False)
        return [
            [
                list(output.outputs[0].token_ids),
                [sorted((token, it.logprob) for token, it in entry.items()) for entry in output.outputs[0].logprobs],
                [
                    sorted((token, it.logprob) for token, it in (at or {}).items())
                    for at in output.prompt_logprobs or ()
                ],
            ]
            for output in outputs
        ]

    def accepted(self) -> float:
        """Drafts that were right until now."""
        found = {metric.name: metric.value for metric in self.llm.get_metrics() if hasattr(metric, "value")}
        return float(found.get("vllm:spec_decode_num_accepted_tokens", 0.0))

    def reload(self, folder: str | None) -> None:
        """From a folder, or the one of last time."""
        self.llm.collective_rpc("reload_weights", kwargs={} if folder is None else {"weights_path": folder})

    def reload_stream(self, folder: str) -> None:
        """By an iterator."""
        self.llm.collective_rpc(_reload_stream, args=(folder,))

    def parts(self, folder: str) -> None:
        """By calls of the model's own method."""
        self.llm.collective_rpc(_load_parts, args=(folder,))

    def transfer(self, folder: str, start: str = "start_weight_update") -> None:
        """By a weight transfer in several updates."""
        self.llm.collective_rpc(start)
        for bucket in _buckets(folder):
            info = {"folder": folder, "names": [name for name, _ in bucket]}
            self.llm.collective_rpc("update_weights", kwargs={"update_info": info})
        self.llm.collective_rpc("finish_weight_update")

    def close(self) -> None:
        """End it."""
        from vllm.distributed import cleanup_dist_env_and_memory

        self.llm.llm_engine.engine_core.shutdown()
        del self.llm
        gc.collect()
        cleanup_dist_env_and_memory()


def _refused(call: Callable[[], None]) -> str:
    try:
        call()
    except Exception as error:  # noqa: BLE001 - the test looks at what it says
        return str(error)
    return ""


def _bad_transfer(it: Updating, folder: str) -> list[str]:
    """A transfer whose second update does not fit: what is said then, and to who would run the model."""
    first, second, *_ = _buckets(folder)
    it.llm.collective_rpc("start_weight_update")
    names = [name for name, _ in first]
    it.llm.collective_rpc("update_weights", kwargs={"update_info": {"folder": folder, "names": names}})
    between = it.llm.collective_rpc(_why_not_ready)[0]
    names = [name for name, _ in second]
    info = {"folder": folder, "names": names, "cut": names[0]}
    refusal = _refused(lambda: it.llm.collective_rpc("update_weights", kwargs={"update_info": info}))
    return [between, refusal, it.llm.collective_rpc(_why_not_ready)[0]]


def run_fresh(folder: str, options: dict[str, Any]) -> tuple[list[Any], float]:
    """What an engine that began with the folder answers, and how many of its drafts were right."""
    fresh = Updating(folder, options)
    found = fresh.answers(), fresh.accepted()
    fresh.close()
    return found


def run_case(
    old: str | None, new: str, bad: dict[str, str], options: dict[str, Any], fresh: str | None = None
) -> dict[str, Any]:
    """Every call on one engine that began with ``old``; of each whether answers are then those of a fresh start.

    ``fresh`` is the file of what a process with no ``old`` found, where a process has one engine in its life: on a GPU
    a second one cannot capture graphs.
    """
    if fresh is None:
        of_new, right = run_fresh(new, options)
    else:
        of_new, right = json.loads(Path(fresh).read_text())
    if old is None:
        return {"fresh": [of_new, right]}
    it = Updating(old, options)
    it.llm.collective_rpc(_install_engine)
    of_old = it.answers()
    found: dict[str, Any] = {"differ": of_new != of_old}
    drafts = "speculative_config" in options
    if drafts:
        before = it.accepted()
        it.transfer(new)
        it.transfer(new, "start_draft_weight_update")
        found["transfer"] = it.answers() == of_new
        found["right drafts"] = [it.accepted() - before, right]
        it.close()
        return found
    it.reload(new)
    found["reload by path"] = it.answers() == of_new
    it.reload(None)
    found["reload in place"] = it.answers() == of_new
    it.reload_stream(old)
    found["reload by iterator"] = it.answers() == of_old
    it.transfer(new)
    found["transfer"] = it.answers() == of_new
    it.parts(old)
    found["parts"] = it.answers() == of_old
    it.llm.sleep(2)
    it.llm.wake_up()
    it.reload(new)
    found["sleep"] = it.answers() == of_new
    found["refused"] = {fault: _refused(lambda folder=folder: it.reload(folder)) for fault, folder in bad.items()}
    found["after refusals"] = it.answers() == of_new
    it.reload(None)
    found["in place after refusals"] = it.answers() == of_new
    if "tensor_parallel_size" in options:  # of an error vLLM reads one rank's answer, and later the others'
        it.close()
        return found
    found["bad transfer"] = _bad_transfer(it, old)
    it.transfer(old)
    found["after a bad transfer"] = it.answers() == of_old
    it.close()
    return found


def main() -> None:
    """Run the cases of one JSON file and write what was found to another."""
    given, wanted = map(Path, sys.argv[1:])
    cases = json.loads(given.read_text())
    gc.unfreeze = lambda: None
    gc.freeze()
    wanted.write_text(json.dumps({name: run_case(**case) for name, case in cases.items()}))


if __name__ == "__main__":
    main()
