"""SGLang on a GPU: our models with decode graphs give the tokens of SGLang's own, on trained checkpoints.

All engines start together, each with processes of its own and a small pool: a start is mostly host work.

SGLang's own Mistral leaves the checkpoint's window out of account, so there ours is held to the right answers alone.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from benchmarks import CHECKPOINTS, FAMILIES, ROOT
from tests.integration.sglang.offline import Ask, Engine, Ran, run

WAYS: Mapping[str, dict[str, Any]] = {
    "graphs": {},
    "eager": {"disable_cuda_graph": True},
    "pages of 16": {"page_size": 16},
    "pages of 64, chunks of 64": {"page_size": 64, "chunked_prefill_size": 64},
    "sglang's attention": {"attention_backend": "triton"},
    "no overlap": {"disable_overlap_schedule": True},
}
NUM_PROMPTS = 200

Key = tuple[str, bool, str]


def _rows() -> list[dict[str, str]]:
    lines = (ROOT / "tests" / "evaluation" / "heldout.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines[:NUM_PROMPTS]]


def _engine(family: str, ours: bool, options: Mapping[str, Any], port: int) -> Engine:
    backend = {} if ours else {"attention_backend": "triton"}
    shared = {"device": "cuda", "sampling_backend": "pytorch", "context_length": 1024, "max_running_requests": 64}
    # A stated pool: measuring what is free makes no sense while others start on the same GPU.
    pool = {"max_total_tokens": 65536, "mem_fraction_static": 0.9, "port": port}
    return Engine(
        str(CHECKPOINTS / family),
        ours,
        [Ask([row["prompt"] for row in _rows()])] * 2,  # the second time from the prefix cache
        {**shared, **pool, **backend, **options},
    )


@pytest.fixture(scope="module")
def engines() -> Mapping[Key, Future[Ran]]:
    """Every engine that the tests look at."""
    keys: list[Key] = [(family, ours, "graphs") for family in FAMILIES for ours in (False, True)]
    keys += [("qwen3", True, way) for way in WAYS if way != "graphs"]
    pool = ThreadPoolExecutor(4)

    def start(index: int, key: Key) -> Ran:
        family, ours, way = key
        return run([_engine(family, ours, WAYS[way], 30000 + 200 * index)], deadline=560.0)[0]

    return {key: pool.submit(start, index, key) for index, key in enumerate(keys)}


def _tokens(ran: Ran) -> list[list[list[int]]]:
    return [[answer.tokens for answer in asked] for asked in ran.answers]


@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "mistral"])
def test_tokens_are_those_of_sglangs_own_model(engines: Mapping[Key, Future[Ran]], family: str) -> None:
    native, ours = engines[family, False, "graphs"].result(), engines[family, True, "graphs"].result()
    assert "atom-plugin serves" not in native.log
    assert "SglangRadixAttention" in ours.log
    assert _tokens(ours) == _tokens(native)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_answer_is_right(engines: Mapping[Key, Future[Ran]], family: str) -> None:
    for answers in engines[family, True, "graphs"].result().answers:
        assert [answer.text.strip() for answer in answers] == [row["answer"] for row in _rows()]


@pytest.mark.parametrize("way", [way for way in WAYS if way != "graphs"])
def test_ways_to_run_do_not_change_tokens(engines: Mapping[Key, Future[Ran]], way: str) -> None:
    ours = engines["qwen3", True, way].result()
    assert _tokens(ours) == _tokens(engines["qwen3", False, "graphs"].result())
