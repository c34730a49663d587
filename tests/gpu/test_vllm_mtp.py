"""vLLM on a GPU drafts by the layer of a trained DeepSeek-V3: the same tokens, on both runners, in graphs and without.

vLLM's own model is no yardstick: none of its backends for prompts takes heads as small as the checkpoint's.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from benchmarks import CHECKPOINTS
from tests.integration.deepseek import RIGHT, TOLERANCE, score
from tests.integration.questions import Row, read_rows, right_tokens
from tests.integration.vllm.offline import Ask, Engine, Ran, run


def _drafting(count: int) -> dict[str, Any]:
    return {"speculative_config": {"method": "mtp", "num_speculative_tokens": count}}


V1, V2 = ({"VLLM_USE_V2_MODEL_RUNNER": number} for number in "01")
WAYS: Mapping[str, tuple[dict[str, Any], dict[str, str]]] = {
    "plain": ({}, {}),
    "1 on V1": (_drafting(1), V1),
    "1 on V2": (_drafting(1), V2),
    "3 on V1": (_drafting(3), V1),
    "3 on V2": (_drafting(3), V2),
    "3, eager": ({**_drafting(3), "enforce_eager": True}, {}),
    "3, compiled": ({**_drafting(3), "compilation_config": {"mode": 3}}, {}),
    "3, an FP8 cache": ({**_drafting(3), "kv_cache_dtype": "fp8"}, {}),
}
EXACT = [way for way in WAYS if "FP8" not in way]
#: Of answers that are right with a cache in FP8.
STILL_RIGHT = 0.95


def _rows() -> list[Row]:
    return read_rows()[:200]


@pytest.fixture(scope="module")
def engines() -> Mapping[str, Future[Ran]]:
    """Every engine that the tests look at."""
    limits = {"kv_cache_memory_bytes": 2 << 30, "gpu_memory_utilization": 0.05, "max_model_len": 1024}
    pool = ThreadPoolExecutor(8)

    def start(way: str) -> Ran:
        options, environ = WAYS[way]
        asks = [Ask([row.prompt for row in _rows()], {"max_tokens": 32})]
        engine = Engine(str(CHECKPOINTS / "deepseek_v3"), "atom", asks, {**limits, "max_num_seqs": 64, **options})
        return run([engine], environ=environ, deadline=540.0)[0]

    return {way: pool.submit(start, way) for way in WAYS}


def _acceptance(ran: Ran) -> float:
    accepted, drafted = (ran.counters[f"vllm:spec_decode_num_{what}_tokens"] for what in ("accepted", "draft"))
    return accepted / drafted


@pytest.mark.parametrize("way", EXACT)
def test_tokens_are_the_right_ones(engines: Mapping[str, Future[Ran]], way: str) -> None:
    ran = engines[way].result()
    assert ran.draft_class == (None if way == "plain" else "AtomDeepseekV3Draft")
    assert [answer.tokens for answer in ran.answers[0]] == right_tokens("deepseek_v3", _rows())


@pytest.mark.parametrize("way", ["1 on V1", "1 on V2"])
def test_as_many_drafts_are_right_as_after_training(engines: Mapping[str, Future[Ran]], way: str) -> None:
    accepted = _acceptance(engines[way].result())
    assert accepted >= RIGHT
    assert accepted == pytest.approx(score("deepseek_v3")["draft"]["acceptance"], abs=TOLERANCE)


def test_an_fp8_cache_leaves_nearly_every_answer_right(engines: Mapping[str, Future[Ran]]) -> None:
    answers = engines["3, an FP8 cache"].result().answers[0]
    right = sum(answer.text.strip() == row.answer for answer, row in zip(answers, _rows(), strict=True))
    assert right >= STILL_RIGHT * len(answers)
