"""SGLang on a GPU drafts by the layer of a trained DeepSeek-V3: the same tokens, with graphs and without."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from benchmarks import CHECKPOINTS
from tests.integration.deepseek import RIGHT
from tests.integration.questions import read_rows, right_tokens
from tests.integration.sglang.offline import Ask, Engine, Ran, drafting, run

#: While drafts are made.
FEWER = {"max_running_requests": 32}
WAYS: Mapping[str, dict[str, Any]] = {
    "plain": {},
    "1": drafting(1, **FEWER),
    "3": drafting(3, **FEWER),
    "3, eager": drafting(3, **FEWER, disable_cuda_graph=True),
    "3, pages of 64, chunks of 64": drafting(3, **FEWER, page_size=64, chunked_prefill_size=64),
    "3, no overlap": drafting(3, **FEWER, disable_overlap_schedule=True),
}
NUM_PROMPTS = 200


@pytest.fixture(scope="module")
def engines() -> Mapping[str, Future[Ran]]:
    """Every engine that the tests look at."""
    shared = {"device": "cuda", "sampling_backend": "pytorch", "context_length": 1024, "max_running_requests": 64}
    limits = {"max_total_tokens": 65536, "mem_fraction_static": 0.9}
    asks = [Ask([row.prompt for row in read_rows()[:NUM_PROMPTS]])] * 2  # the second time from the prefix cache
    pool = ThreadPoolExecutor(4)

    def start(index: int, way: str) -> Ran:
        options = {**shared, **limits, "port": 34000 + 200 * index, **WAYS[way]}
        return run([Engine(str(CHECKPOINTS / "deepseek_v3"), True, asks, options)], deadline=560.0)[0]

    return {way: pool.submit(start, index, way) for index, way in enumerate(WAYS)}


@pytest.mark.parametrize("way", WAYS)
def test_tokens_are_the_right_ones(engines: Mapping[str, Future[Ran]], way: str) -> None:
    ran = engines[way].result()
    assert ("atom-plugin drafts for" in ran.log) == (way != "plain")
    expected = right_tokens("deepseek_v3", read_rows()[:NUM_PROMPTS])
    assert [[answer.tokens for answer in answers] for answers in ran.answers] == [expected, expected]


@pytest.mark.parametrize("way", [way for way in WAYS if way != "plain"])
def test_drafts_are_made_and_taken(engines: Mapping[str, Future[Ran]], way: str) -> None:
    answers = [answer for asked in engines[way].result().answers for answer in asked]
    right, proposed = (
        sum(answer.meta[f"spec_num_{what}_drafts"] for answer in answers) for what in ("correct", "proposed")
    )
    # Of several drafts in a row the later ones are less often right.
    assert right / proposed >= (RIGHT if way == "1" else RIGHT / 3)
