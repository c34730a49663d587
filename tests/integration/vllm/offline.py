"""vLLM without a server: engines one after the other in a process of their own.

The quickest way to run hundreds of prompts through many configurations: importing vLLM takes longer than starting a
small model, so one process runs a list of engines. `run` starts it; the rest of this file is what runs there.
"""

from __future__ import annotations

import gc
import itertools
import json
import os
import sys
import tempfile
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

#: Room for some ten thousand tokens of the small models, which takes less time to fill with zeros than a gigabyte.
KV_CACHE_BYTES = 256 * 2**20


@dataclass(frozen=True)
class Ask:
    """Prompts that go to an engine at once, as text or tokens, and arguments of `SamplingParams`; greedy by default.

    ``aborted`` are asked beside them and given up after a few steps.
    """

    prompts: Sequence[str | Sequence[int]]
    sampling: Mapping[str, Any] = field(default_factory=dict)
    aborted: Sequence[str | Sequence[int]] = ()


@dataclass(frozen=True)
class Engine:
    """One `LLM`, and what it is asked in turn.

    Args:
        model: the checkpoint's folder.
        impl: as for `--model-impl`.
        asks: the prompts.
        options: further arguments of `LLM`.
        environ: variables set while it is made; only what is read anew for each engine can be set here.
        poisoned: whether states (of linear attention) have NaN in their memory before the first request.
        stepped: whether `Ran.steps` is wanted.
    """

    model: str
    impl: str
    asks: Sequence[Ask]
    options: Mapping[str, Any] = field(default_factory=dict)
    environ: Mapping[str, str] = field(default_factory=dict)
    poisoned: bool = False
    stepped: bool = False


@dataclass(frozen=True)
class Answer:
    """What came back for one prompt."""

    text: str
    tokens: list[int]
    logprobs: list[dict[str, float]]
    """For each new token the asked-for number of most likely ones, by token id; empty where not asked for."""
    prompt_logprobs: list[dict[str, float]]
    routed_experts: list[list[list[int]]] | None = None
    """Of each token but the last and each layer, the experts; None where not asked for."""
    num_cached_tokens: int = field(default=0, compare=False)
    """Of the prompt, those that were in the prefix cache when the request began."""
    began: float = field(default=0.0, compare=False)
    ended: float = field(default=0.0, compare=False)
    """When the request first was in a step, and when it had its last token, in seconds of one clock."""


@dataclass(frozen=True)
class Ran:
    """What an engine did."""

    model_class: str
    layer_classes: list[str]
    """Names of the classes of the model's layers, sorted."""
    kernels: dict[str, str]
    """Our model's implementation of each op; empty for any other model."""
    draft_class: str | None
    state_dtypes: list[str]
    """Of what layers keep of a request beside pages: "torch.float32" and so on, each once."""
    compiled: bool
    """Whether the model went through torch.compile."""
    answers: list[list[Answer]]
    """One list for each `Ask`."""
    counters: dict[str, float]
    """vLLM's own, by name: "vllm:num_preemptions" and so on."""
    graph_mode: str
    """Which graphs vLLM captured in the end: "NONE", "PIECEWISE", "FULL", "FULL_AND_PIECEWISE", ..."""
    steps: list[list[list[int]]] = field(default_factory=list)
    """Of each step of layers with states, for each request: tokens computed before, new ones, and 1 if they are a
    prompt's. With `Engine.stepped` alone."""
    log: str = ""
    """All that the process has printed, for every engine."""

    @classmethod
    def read(cls, found: dict[str, Any], log: str) -> Ran:
        """From JSON."""
        answers = [[Answer(**answer) for answer in asked] for asked in found["answers"]]
        return cls(**{**found, "answers": answers, "log": log})


def run(
    engines: Sequence[Engine],
    *,
    environ: Mapping[str, str | None] | None = None,
    deadline: float = 400.0,
    script: Path = Path(__file__),
) -> list[Ran]:
    """Run `engines` in turn in one fresh process.

    Args:
        engines: what to run.
        environ: variables to set beside those of this process.
        deadline: seconds for all of it.
        script: this file, or one that prepares something and then calls `main`.

    Raises:
        AssertionError: an engine failed, or the deadline has passed; the message holds the end of the log.
    """
    from tests.integration.preloaded import run_script

    variables = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", **(environ or {})}
    with tempfile.TemporaryDirectory() as folder:
        given, wanted = Path(folder, "engines.json"), Path(folder, "ran.json")
        given.write_text(json.dumps([asdict(engine) for engine in engines]))
        finished = run_script(script, [str(given), str(wanted)], variables, deadline)
        assert finished.returncode == 0, f"exit code {finished.returncode}:\n{finished.tail()}"
        return [Ran.read(found, finished.log) for found in json.loads(wanted.read_text())]


def main() -> None:
    """Run the engines of one JSON file and write what they did to another."""
    given, wanted = map(Path, sys.argv[1:])
    found = []
    for engine in json.loads(given.read_text()):
        try:
            found.append(_run_engine(**engine))
        except Exception:  # noqa: BLE001 - the log's end says what it was, and whose
            traceback.print_exc()
            sys.exit(f"engine {len(found) + 1} failed: {engine['model']}, {engine['options']}")
    wanted.write_text(json.dumps(found))


def _run_engine(
    model: str,
    impl: str,
    asks: list[dict[str, Any]],
    options: dict[str, Any],
    environ: dict[str, str],
    poisoned: bool,
    stepped: bool,
) -> dict[str, Any]:
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory

    # What is there by now stays: collecting what an engine leaves behind, which it does ten times, need not look there.
    # vLLM undoes this where it shuts an engine down, and takes most of a small engine's time to collect once more.
    gc.unfreeze = lambda: None
    gc.freeze()
    os.environ.update(environ)
    llm = LLM(model, model_impl=impl, disable_log_stats=False, **{"kv_cache_memory_bytes": KV_CACHE_BYTES, **options})
    for name in environ:
        del os.environ[name]
    if poisoned:
        llm.collective_rpc(_poison)
    try:
        described = llm.collective_rpc(_describe)[0]
        with _steps_written() if stepped else nullcontext([]) as steps:
            answers = [_ask(llm, **ask) for ask in asks]
        found = {
            **described,
            "answers": answers,
            "steps": steps,
            "counters": {metric.name: metric.value for metric in llm.get_metrics() if hasattr(metric, "value")},
            "graph_mode": llm.llm_engine.vllm_config.compilation_config.cudagraph_mode.name,
        }
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()
        cleanup_dist_env_and_memory()
    return found


def _ask(llm: Any, prompts: list[Any], sampling: dict[str, Any], aborted: list[Any]) -> list[dict[str, Any]]:
    from vllm import SamplingParams

    params = SamplingParams(**{"temperature": 0.0, **sampling})
    asked, given_up = (
        [it if isinstance(it, str) else {"prompt_token_ids": it} for it in kind] for kind in (prompts, aborted)
    )
    if given_up:
        outputs = _generate_beside(llm.llm_engine, asked, given_up, params)
    else:
        outputs = llm.generate(asked, params, use_tqdm=False)
    return [
        {
            "text": output.outputs[0].text,
            "tokens": list(output.outputs[0].token_ids),
            "logprobs": [_by_token(entry) for entry in output.outputs[0].logprobs or ()],
            "prompt_logprobs": [_by_token(entry) for entry in output.prompt_logprobs or ()],
            "routed_experts": _as_lists(output.outputs[0].routed_experts),
            "num_cached_tokens": output.num_cached_tokens or 0,
            "began": output.metrics.scheduled_ts,
            "ended": output.metrics.last_token_ts,
        }
        for output in outputs
    ]


def _generate_beside(engine: Any, asked: list[Any], given_up: list[Any], params: Any) -> list[Any]:
    """What `asked` are answered while every second request is given up."""
    for at in range(max(len(asked), len(given_up))):
        for kind, prompts in (("given up", given_up), ("asked", asked)):
            if at < len(prompts):
                engine.add_request(f"{kind} {at}", prompts[at], params)
    finished: dict[str, Any] = {}
    begun, cut_short = set(), False
    left = [f"given up {at}" for at in range(len(given_up))]
    for step in itertools.count():
        if not engine.has_unfinished_requests():
            assert cut_short, "no request was given up after its first token and before its last one"
            return [finished[f"asked {at}"] for at in range(len(asked))]
        for output in engine.step():
            begun.add(output.request_id)
            if output.finished:
                finished[output.request_id] = output
        left = [name for name in left if name not in finished]
        if step % 3 == 2 and left:
            # The first one is in its prompt; then those with tokens go, and while there are none, those that wait.
            name = next((name for name in left if name in begun), left[-1 if begun else 0])
            cut_short |= name in begun
            engine.abort_request([name])
            left.remove(name)
    raise AssertionError("unreachable")


@contextmanager
def _steps_written() -> Iterator[list[list[list[int]]]]:
    """What our builder for states is told of each step, once for each group of layers, in this process."""
    from atom_plugin.vllm.states import AtomStateMetadataBuilder

    steps: list[list[list[int]]] = []
    build = AtomStateMetadataBuilder.build

    def written(self: Any, common_prefix_len: int, common_attn_metadata: Any, *args: Any, **more: Any) -> Any:
        common = common_attn_metadata
        if common.is_prefilling is not None:
            new = common.query_start_loc_cpu.diff()
            before = common.seq_lens_cpu_upper_bound[: len(new)] - new
            rows = zip(before.tolist(), new.tolist(), common.is_prefilling.int().tolist(), strict=True)
            steps.append([list(row) for row in rows if row[1]])
        return build(self, common_prefix_len, common, *args, **more)

    AtomStateMetadataBuilder.build = written
    try:
        yield steps
    finally:
        AtomStateMetadataBuilder.build = build


def _states(worker: Any) -> Iterator[Any]:
    """All tensors with states of requests."""
    layers = worker.vllm_config.compilation_config.static_forward_context.values()
    caches = (getattr(layer, "kv_cache", None) for layer in layers)
    return itertools.chain(*(cache for cache in caches if isinstance(cache, tuple)))


def _poison(worker: Any) -> None:
    for state in _states(worker):
        state.fill_(float("nan"))


def _as_lists(array: Any) -> Any:
    return None if array is None else array.tolist()


def _by_token(entry: Mapping[int, Any] | None) -> dict[str, float]:
    return {str(token): found.logprob for token, found in (entry or {}).items()}


def _describe(worker: Any) -> dict[str, Any]:
    runner = worker.model_runner
    model, draft = runner.get_model(), runner.get_draft_model()
    runtime = getattr(model, "runtime", None)
    return {
        "model_class": type(model).__name__,
        "layer_classes": sorted({type(layer).__name__ for layer in model.modules()}),
        "kernels": {choice.op: choice.implementation for choice in runtime.kernels.choices()} if runtime else {},
        "state_dtypes": sorted({str(state.dtype) for state in _states(worker)}),
        "draft_class": None if draft is None else type(draft).__name__,
        "compiled": not getattr(model, "do_not_compile", True),
    }


if __name__ == "__main__":
    main()
