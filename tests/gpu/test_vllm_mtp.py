"""vLLM on a GPU drafts by the layer of a trained DeepSeek-V3: the same tokens, on both runners, in graphs and without.

vLLM's own model is the other yardstick: its tokens, and how many of its drafts are right. None of its backends for
prompts takes heads as small as the checkpoint's, so it serves a copy with latents and heads of the real sizes.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import pytest

from benchmarks import CHECKPOINTS
from tests.integration.deepseek import RIGHT, TOLERANCE, score
from tests.integration.questions import Row, read_rows, right_tokens
from tests.integration.vllm.offline import Ask, Engine, Ran, run
from tests.unit.core.real_latents import with_real_latents


@dataclass(frozen=True)
class Way:
    """An engine's."""

    drafts: int = 0
    options: Mapping[str, Any] = field(default_factory=dict)
    runner: int | None = None
    impl: str = "atom"
    real: bool = False
    """With latents and heads of the real sizes."""


WAYS: Mapping[str, Way] = {
    "plain": Way(),
    "1 on V1": Way(1, runner=1),
    "1 on V2": Way(1, runner=2),
    "3 on V1": Way(3, runner=1),
    "3 on V2": Way(3, runner=2),
    "3, eager": Way(3, {"enforce_eager": True}),
    "3, compiled": Way(3, {"compilation_config": {"mode": 3}}),
    "3, an FP8 cache": Way(3, {"kv_cache_dtype": "fp8"}),
    "real": Way(real=True),
    "real, 1": Way(1, real=True),
    "native": Way(real=True, impl="auto"),
    "native, 1": Way(1, real=True, impl="auto"),
}
EXACT = [name for name in WAYS if "FP8" not in name]
#: Of answers that are right with a cache in FP8.
STILL_RIGHT = 0.95


def _rows() -> list[Row]:
    return read_rows()[:200]


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Future[Ran]]:
    """Every engine that the tests look at."""
    limits = {"kv_cache_memory_bytes": 2 << 30, "gpu_memory_utilization": 0.05, "max_model_len": 1024}
    small, real = CHECKPOINTS / "deepseek_v3", tmp_path_factory.mktemp("checkpoints") / "real"
    with_real_latents(small, real)
    pool = ThreadPoolExecutor(12)

    def start(way: Way) -> Ran:
        asks = [Ask([row.prompt for row in _rows()], {"max_tokens": 32})]
        options = {**limits, "max_num_seqs": 64, **way.options}
        if way.drafts:
            options["speculative_config"] = {"method": "mtp", "num_speculative_tokens": way.drafts}
        environ = {} if way.runner is None else {"VLLM_USE_V2_MODEL_RUNNER": str(way.runner - 1)}
        engine = Engine(str(real if way.real else small), way.impl, asks, options)
        return run([engine], environ=environ, deadline=540.0)[0]

    return {name: pool.submit(start, way) for name, way in WAYS.items()}


def _acceptance(ran: Ran) -> float:
    accepted, drafted = (ran.counters[f"vllm:spec_decode_num_{what}_tokens"] for what in ("accepted", "draft"))
    return accepted / drafted


@pytest.mark.parametrize("name", EXACT)
def test_tokens_are_the_right_ones(engines: Mapping[str, Future[Ran]], name: str) -> None:
    ran, way = engines[name].result(), WAYS[name]
    if way.impl == "atom":
        assert ran.draft_class == ("AtomDeepseekV3Draft" if way.drafts else None)
    assert [answer.tokens for answer in ran.answers[0]] == right_tokens("deepseek_v3", _rows())


@pytest.mark.parametrize("name", ["1 on V1", "1 on V2", "real, 1"])
def test_as_many_drafts_are_right_as_after_training(engines: Mapping[str, Future[Ran]], name: str) -> None:
    accepted = _acceptance(engines[name].result())
    assert accepted >= RIGHT
    assert accepted == pytest.approx(score("deepseek_v3")["draft"]["acceptance"], abs=TOLERANCE)


def test_as_many_drafts_are_right_as_of_vllms_own_model(engines: Mapping[str, Future[Ran]]) -> None:
    ours, native = (_acceptance(engines[name].result()) for name in ("real, 1", "native, 1"))
    assert ours == pytest.approx(native, abs=TOLERANCE)


def test_an_fp8_cache_leaves_nearly_every_answer_right(engines: Mapping[str, Future[Ran]]) -> None:
    answers = engines["3, an FP8 cache"].result().answers[0]
    right = sum(answer.text.strip() == row.answer for answer, row in zip(answers, _rows(), strict=True))
    assert right >= STILL_RIGHT * len(answers)
