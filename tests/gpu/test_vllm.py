"""vLLM on a GPU: our models under every kind of graph give the tokens of vLLM's own, on trained checkpoints.

Engines start together, each in a process of its own with a small share of the GPU: a start is mostly host work.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from benchmarks import CHECKPOINTS, FAMILIES
from tests.gpu.late_compiles import SCRIPT, late_compiles
from tests.gpu.vllm_engines import engine, held_out
from tests.integration.vllm.offline import Ask, Ran, run
from tests.integration.vllm.page_of_the_step import check

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

Key = tuple[str, str, str]


def _ask() -> Ask:
    return Ask([row["prompt"] for row in held_out()], {"max_tokens": 32})


@pytest.fixture(scope="module")
def engines() -> Mapping[Key, Future[Ran]]:
    """Every engine that the tests look at."""
    keys: list[Key] = [(family, impl, "default") for family in FAMILIES for impl in ("auto", "atom")]
    keys += [("qwen3", "atom", name) for name in (*GRAPHS, *WAYS) if name != "default"]
    keys += [(family, impl, "fp8") for family in FAMILIES for impl in ("auto", "atom")]
    keys += [(family, "atom", "fp8-weights") for family in FAMILIES]
    keys += [("qwen3", "atom", "fp8-eager")]
    pool = ThreadPoolExecutor(16)

    def start(key: Key) -> Ran:
        family, impl, name = key
        options = {**GRAPHS, **CACHES, **WEIGHTS}.get(name, {})
        return run([engine(family, impl, options, [_ask()])], environ=WAYS.get(name), deadline=540.0)[0]

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


@pytest.mark.parametrize("runner", ["v1-runner", "v2-runner"])
def test_a_request_reads_what_another_writes_in_the_same_step(runner: str) -> None:
    options = {"model": str(CHECKPOINTS / "qwen3"), "model_impl": "atom", "dtype": "float32", "max_model_len": 512}
    options |= {"block_size": 16, "max_num_seqs": 8, "kv_cache_memory_bytes": 1 << 28, "gpu_memory_utilization": 0.05}
    check(options, WAYS[runner], tolerance=1e-2)


def test_prefill_outside_of_graphs_is_to_be_had(engines: Mapping[Key, Future[Ran]]) -> None:
    ran = engines["qwen3", "atom", "no-breaks"].result()
    assert (ran.graph_mode, ran.compiled) == ("FULL_DECODE_ONLY", False)


def _num_right(ran: Ran) -> int:
    return sum(answer.text == f" {row['answer']}\n" for answer, row in zip(ran.answers[0], held_out(), strict=True))


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


def test_no_kernel_of_ours_is_compiled_once_the_engine_is_ready() -> None:
    prompts = [row["prompt"] for row in held_out()]
    asks = [
        Ask(prompts[:1], {"max_tokens": 32}),
        Ask(prompts[1:4], {"max_tokens": 32}),
        Ask(prompts, {"max_tokens": 32}),
    ]
    (ran,) = run([engine("qwen3", "atom", {}, asks)], script=SCRIPT, deadline=540.0)
    assert late_compiles(ran.log) == []
