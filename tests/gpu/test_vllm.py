"""vLLM on a GPU: our models under every kind of graph give the tokens of vLLM's own, on trained checkpoints.

All engines start together, each in a process of its own with a small share of the GPU: a start is mostly host work.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from benchmarks import CHECKPOINTS, FAMILIES, ROOT
from tests.integration.vllm.offline import Ask, Engine, Ran, run

GRAPHS: Mapping[str, dict[str, Any]] = {
    "default": {},
    "full": {"compilation_config": {"cudagraph_mode": "FULL"}},
    "piecewise": {"compilation_config": {"cudagraph_mode": "PIECEWISE"}},
    "full-uncompiled": {"compilation_config": {"mode": 0, "cudagraph_mode": "FULL"}},
    "eager": {"enforce_eager": True},
}
#: Ways to run that graphs have no part in: variables of the environment.
WAYS: Mapping[str, dict[str, str]] = {
    "v1-runner": {"VLLM_USE_V2_MODEL_RUNNER": "0"},
    "v2-runner": {"VLLM_USE_V2_MODEL_RUNNER": "1"},
    "vllm-attention": {"ATOM_DISABLE_VLLM_ATTENTION": "1"},
    "breakable-graphs": {"VLLM_USE_BREAKABLE_CUDAGRAPH": "1"},
}
NUM_PROMPTS = 200

Key = tuple[str, str, str]


def _ask() -> Ask:
    rows = [json.loads(line) for line in (ROOT / "tests" / "evaluation" / "heldout.jsonl").read_text().splitlines()]
    return Ask([row["prompt"] for row in rows[:NUM_PROMPTS]], {"max_tokens": 32})


def _engine(family: str, impl: str, options: Mapping[str, Any]) -> Engine:
    # A stated cache size: measuring what is free makes no sense while others start on the same GPU.
    limits = {"kv_cache_memory_bytes": 2 << 30, "gpu_memory_utilization": 0.05, "max_model_len": 1024}
    return Engine(str(CHECKPOINTS / family), impl, [_ask()], {**limits, "max_num_seqs": 64, **options})


@pytest.fixture(scope="module")
def engines() -> Mapping[Key, Future[Ran]]:
    """Every engine that the tests look at."""
    keys: list[Key] = [(family, impl, "default") for family in FAMILIES for impl in ("auto", "atom")]
    keys += [("qwen3", "atom", name) for name in (*GRAPHS, *WAYS) if name != "default"]
    pool = ThreadPoolExecutor(len(keys))

    def start(key: Key) -> Ran:
        family, impl, name = key
        return run([_engine(family, impl, GRAPHS.get(name, {}))], environ=WAYS.get(name), deadline=540.0)[0]

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
        ("piecewise", "PIECEWISE"),
        ("full-uncompiled", "FULL"),
        ("eager", "NONE"),
    ],
)
def test_the_graphs_that_were_asked_for_were_captured(
    engines: Mapping[Key, Future[Ran]], graphs: str, mode: str
) -> None:
    assert engines["qwen3", "atom", graphs].result().graph_mode == mode
