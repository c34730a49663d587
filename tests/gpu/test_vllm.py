"""vLLM on a GPU: our models under every kind of graph give the tokens of vLLM's own, on trained checkpoints.

Engines start together, each in a process of its own with a small share of the GPU: a start is mostly host work.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from statistics import mean
from typing import Any

import pytest

from benchmarks import CHECKPOINTS, FAMILIES, ROOT
from tests.integration.vllm.offline import Ask, Engine, Ran, run

GRAPHS: Mapping[str, dict[str, Any]] = {
    "default": {},
    "full": {"compilation_config": {"cudagraph_mode": "FULL"}},
    "compiled": {"compilation_config": {"mode": 3}},
    "full-compiled": {"compilation_config": {"mode": 3, "cudagraph_mode": "FULL"}},
    "piecewise": {"compilation_config": {"cudagraph_mode": "PIECEWISE"}},
    "no-graphs": {"compilation_config": {"cudagraph_mode": "NONE"}},
    "eager": {"enforce_eager": True},
}
#: Ways to run that graphs have no part in: variables of the environment.
WAYS: Mapping[str, dict[str, str]] = {
    "v1-runner": {"VLLM_USE_V2_MODEL_RUNNER": "0"},
    "v2-runner": {"VLLM_USE_V2_MODEL_RUNNER": "1"},
    "vllm-attention": {"ATOM_DISABLE_VLLM_ATTENTION": "1"},
    "breakable-graphs": {"VLLM_USE_BREAKABLE_CUDAGRAPH": "1"},
    "no-breaks": {"VLLM_USE_BREAKABLE_CUDAGRAPH": "0"},
}
#: Caches of other dtypes. Numbers of one byte cost an answer now and then, so answers are counted.
CACHES: Mapping[str, dict[str, Any]] = {
    "fp8": {"kv_cache_dtype": "fp8"},
    "fp8-eager": {"kv_cache_dtype": "fp8_e4m3", "enforce_eager": True},
}
#: Weights quantised while loading: native has one scale a tensor, ours a scale a row.
WEIGHTS: Mapping[str, dict[str, Any]] = {"fp8-weights": {"quantization": "fp8"}}
#: Of the answers that are right with a cache in the model's dtype, and of vLLM's own with the same cache.
STILL_RIGHT, AS_NATIVE = 0.95, 0.9
#: Prompts in a row: how many, up to nearly as many tokens as the model has positions, or is told to have.
LONG: Mapping[str, tuple[int, dict[str, Any]]] = {
    "2k": (8, {"max_model_len": 2048}),
    "8k": (31, {"max_model_len": 8192, "hf_overrides": {"max_position_embeddings": 8192}}),
}
EXACT = "in float32"
#: Log-probabilities in bfloat16 may be so many times as far from float32's, on average, as native's are.
AS_EXACT = 1.25
NUM_PROMPTS = 200

Key = tuple[str, str, str]


def _rows() -> list[dict[str, str]]:
    lines = (ROOT / "tests" / "evaluation" / "heldout.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines[:NUM_PROMPTS]]


def _ask() -> Ask:
    return Ask([row["prompt"] for row in _rows()], {"max_tokens": 32})


def _ask_at_length(count: int) -> Ask:
    prompts = [row["prompt"] for row in _rows()]
    joined = ["\n\n".join(prompts[at : at + count]) for at in range(0, 100, 5)]
    return Ask(joined, {"max_tokens": 8, "logprobs": 2})


def _engine(family: str, impl: str, options: Mapping[str, Any], asks: list[Ask]) -> Engine:
    # A stated cache size: measuring what is free makes no sense while others start on the same GPU.
    limits = {"kv_cache_memory_bytes": 2 << 30, "gpu_memory_utilization": 0.05, "max_model_len": 1024}
    return Engine(str(CHECKPOINTS / family), impl, asks, {**limits, "max_num_seqs": 64, **options})


@pytest.fixture(scope="module")
def engines() -> Mapping[Key, Future[Ran]]:
    """Every engine that the tests look at."""
    keys: list[Key] = [(family, impl, "default") for family in FAMILIES for impl in ("auto", "atom")]
    keys += [("qwen3", "atom", name) for name in (*GRAPHS, *WAYS) if name != "default"]
    keys += [(family, impl, "fp8") for family in FAMILIES for impl in ("auto", "atom")]
    keys += [(family, "atom", "fp8-weights") for family in FAMILIES]
    keys += [("qwen3", "atom", "fp8-eager"), *(("qwen3", impl, name) for impl in ("auto", "atom") for name in LONG)]
    keys += [("qwen3", "auto", f"{name} {EXACT}") for name in LONG]
    pool = ThreadPoolExecutor(16)

    def start(key: Key) -> Ran:
        family, impl, name = key
        if (long := name.removesuffix(f" {EXACT}")) in LONG:
            count, options = LONG[long]
            dtype = "float32" if name.endswith(EXACT) else "bfloat16"
            engine = _engine(family, impl, {**options, "dtype": dtype}, [_ask_at_length(count)])
            return run([engine], deadline=540.0)[0]
        options = {**GRAPHS, **CACHES, **WEIGHTS}.get(name, {})
        return run([_engine(family, impl, options, [_ask()])], environ=WAYS.get(name), deadline=540.0)[0]

    return {key: pool.submit(start, key) for key in keys}


def _tokens(ran: Ran) -> list[list[int]]:
    return [answer.tokens for answer in ran.answers[0]]


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_are_those_of_vllms_own_model(engines: Mapping[Key, Future[Ran]], family: str) -> None:
    native, ours = engines[family, "auto", "default"].result(), engines[family, "atom", "default"].result()
    assert ours.model_class.startswith("Atom")
    assert "VllmPagedAttention" in ours.layer_classes
    assert _tokens(ours) == _tokens(native)


@pytest.mark.parametrize("graphs", [name for name in GRAPHS if name != "default"])
def test_graphs_do_not_change_tokens(engines: Mapping[Key, Future[Ran]], graphs: str) -> None:
    ours = engines["qwen3", "atom", graphs].result()
    assert _tokens(ours) == _tokens(engines["qwen3", "auto", "default"].result())


@pytest.mark.parametrize("way", list(WAYS))
def test_ways_to_run_do_not_change_tokens(engines: Mapping[Key, Future[Ran]], way: str) -> None:
    ours = engines["qwen3", "atom", way].result()
    assert ours.model_class == "AtomQwen3ForCausalLM"
    assert ("FrameworkAttention" in ours.layer_classes) == (way == "vllm-attention")
    assert _tokens(ours) == _tokens(engines["qwen3", "auto", "default"].result())


@pytest.mark.parametrize(
    ("graphs", "mode"),
    [
        ("default", "FULL_AND_PIECEWISE"),
        ("full", "FULL"),
        ("compiled", "FULL_AND_PIECEWISE"),
        ("full-compiled", "FULL"),
        ("piecewise", "PIECEWISE"),
        ("no-graphs", "NONE"),
        ("eager", "NONE"),
    ],
)
def test_the_graphs_that_were_asked_for_were_captured(
    engines: Mapping[Key, Future[Ran]], graphs: str, mode: str
) -> None:
    ran = engines["qwen3", "atom", graphs].result()
    assert ran.graph_mode == mode
    assert ran.compiled == (graphs in ("compiled", "full-compiled"))


def test_both_runners_have_the_same_default(engines: Mapping[Key, Future[Ran]]) -> None:
    for way in ("v1-runner", "v2-runner"):
        ran = engines["qwen3", "atom", way].result()
        assert (ran.graph_mode, ran.compiled) == ("FULL_AND_PIECEWISE", False)


def test_prefill_outside_of_graphs_is_to_be_had(engines: Mapping[Key, Future[Ran]]) -> None:
    ran = engines["qwen3", "atom", "no-breaks"].result()
    assert (ran.graph_mode, ran.compiled) == ("FULL_DECODE_ONLY", False)


def _num_right(ran: Ran) -> int:
    return sum(answer.text == f" {row['answer']}\n" for answer, row in zip(ran.answers[0], _rows(), strict=True))


def _share_alike(ours: Ran, theirs: Ran) -> float:
    pairs = list(zip(_tokens(ours), _tokens(theirs), strict=True))
    return sum(mine == other for mine, other in pairs) / len(pairs)


@pytest.mark.parametrize("family", FAMILIES)
def test_answers_from_an_fp8_cache_are_right_but_for_a_few(engines: Mapping[Key, Future[Ran]], family: str) -> None:
    ours, full = engines[family, "atom", "fp8"].result(), engines[family, "atom", "default"].result()
    assert ours.graph_mode == "FULL_AND_PIECEWISE"
    assert "VllmPagedAttention" in ours.layer_classes
    assert _num_right(ours) >= STILL_RIGHT * _num_right(full)
    assert _share_alike(ours, engines[family, "auto", "fp8"].result()) >= AS_NATIVE


@pytest.mark.parametrize("family", FAMILIES)
def test_answers_with_fp8_weights_are_right_but_for_a_few(engines: Mapping[Key, Future[Ran]], family: str) -> None:
    ours, full = (engines[family, "atom", name].result() for name in ("fp8-weights", "default"))
    assert _num_right(ours) >= STILL_RIGHT * _num_right(full)


def test_graphs_do_not_change_answers_from_an_fp8_cache(engines: Mapping[Key, Future[Ran]]) -> None:
    graphs, eager = (engines["qwen3", "atom", name].result() for name in ("fp8", "fp8-eager"))
    assert _share_alike(graphs, eager) >= AS_NATIVE


def _against(ran: Ran, exact: Ran) -> tuple[list[float], list[float]]:
    """Of the tokens up to where an answer parts from float32's: errors of log-probabilities, and margins at partings.

    Errors are of tokens that both count among their likeliest; a margin is how much float32 prefers its own token.
    """
    errors, margins = [], []
    for ours, theirs in zip(ran.answers[0], exact.answers[0], strict=True):
        steps = zip(ours.tokens, theirs.tokens, ours.logprobs, theirs.logprobs, strict=True)
        for mine, other, likely, exactly in steps:
            errors += [abs(likely[token] - exactly[token]) for token in likely.keys() & exactly.keys()]
            if mine != other:
                first, second = sorted(exactly.values(), reverse=True)[:2]
                margins.append(first - second)
                break
    return errors, margins


@pytest.mark.parametrize("length", LONG)
def test_long_prompts_get_the_tokens_of_float32_but_for_the_noise_of_bfloat16(
    engines: Mapping[Key, Future[Ran]], length: str
) -> None:
    """The noise is native's, on the same prompts: two log-probabilities may be off by its largest error each."""
    ours, native = (engines["qwen3", impl, length].result() for impl in ("atom", "auto"))
    exact = engines["qwen3", "auto", f"{length} {EXACT}"].result()
    assert ours.model_class == "AtomQwen3ForCausalLM"
    (errors, margins), (noise, _) = _against(ours, exact), _against(native, exact)
    found = f"errors {mean(errors):.4f}, most {max(errors):.4f}; of native {mean(noise):.4f}, most {max(noise):.4f}"
    assert mean(errors) <= AS_EXACT * mean(noise), found
    assert max(margins, default=0.0) <= 2 * max(noise), f"{found}; margins {sorted(margins)}"


def test_no_kernel_of_ours_is_compiled_once_the_engine_is_ready() -> None:
    prompts = [row["prompt"] for row in _rows()]
    asks = [
        Ask(prompts[:1], {"max_tokens": 32}),
        Ask(prompts[1:4], {"max_tokens": 32}),
        Ask(prompts, {"max_tokens": 32}),
    ]
    run([_engine("qwen3", "atom", {}, asks)], script=Path(__file__).with_name("late_compiles.py"), deadline=540.0)
