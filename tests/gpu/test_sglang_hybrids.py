"""SGLang on a GPU answers by trained hybrids, also what only states remember: with graphs, copies of states, drafts.

No request waits for a kernel of ours to be compiled.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from benchmarks import CHECKPOINTS, ROOT
from tests.integration.deepseek import RIGHT
from tests.integration.questions import read_rows
from tests.integration.sglang.offline import Ask, Engine, Ran, drafting, run

#: While drafts are made.
FEWER = {"max_running_requests": 32}
WAYS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "Next": ("qwen3_next", {}),
    "Next, eager": ("qwen3_next", {"disable_cuda_graph": True}),
    "Next, no copies": (
        "qwen3_next",
        {"mamba_radix_cache_strategy": "no_buffer", "disable_overlap_schedule": True, "chunked_prefill_size": 64},
    ),
    "Next, SGLang's attention": ("qwen3_next", {"attention_backend": "triton"}),
    "Next, 3 drafts": ("qwen3_next", drafting(3, **FEWER)),
    "Next, 3 drafts, eager": ("qwen3_next", drafting(3, **FEWER, disable_cuda_graph=True)),
    "3.5": ("qwen3_5", {"page_size": 64, "chunked_prefill_size": 64, "mamba_ssm_dtype": "bfloat16"}),
    "3.5, 1 draft": ("qwen3_5", drafting(1, **FEWER, page_size=16, mamba_track_interval=64)),
}
NUM_PROMPTS = 200


def _asked() -> list[tuple[str, str]]:
    """Prompts and their answers."""
    lines = (ROOT / "tests" / "evaluation" / "recall.jsonl").read_text(encoding="utf-8").splitlines()
    remembered = [(row["prompt"], row["answer"]) for row in map(json.loads, lines)]
    return [*remembered, *((row.prompt, row.answer) for row in read_rows()[:NUM_PROMPTS])]


@pytest.fixture(scope="module")
def engines() -> Mapping[str, Future[Ran]]:
    """Every engine that the tests look at."""
    shared = {"device": "cuda", "sampling_backend": "pytorch", "context_length": 2048, "max_running_requests": 64}
    limits = {"max_total_tokens": 65536, "max_mamba_cache_size": 512, "mem_fraction_static": 0.9}
    asks = [Ask([prompt for prompt, _ in _asked()])] * 2  # the second time from the prefix cache
    watched = os.pathsep.join([str(Path(__file__).with_name("late_on_sglang")), os.environ.get("PYTHONPATH", "")])
    pool = ThreadPoolExecutor(4)

    def start(index: int, way: str) -> Ran:
        family, options = WAYS[way]
        given = {**shared, **limits, "port": 38000 + 200 * index, **options}
        engine = Engine(str(CHECKPOINTS / family), True, asks, given, {"PYTHONPATH": watched})
        return run([engine], deadline=560.0)[0]

    return {way: pool.submit(start, index, way) for index, way in enumerate(WAYS)}


@pytest.mark.parametrize("way", WAYS)
def test_every_answer_is_right(engines: Mapping[str, Future[Ran]], way: str) -> None:
    ran = engines[way].result()
    assert "atom-plugin serves" in ran.log
    expected = [f" {answer}\n" for _, answer in _asked()]
    for answers in ran.answers:
        assert [answer.text for answer in answers] == expected
    # A state is kept where a chunk or an interval of tokens ends, so short prompts have none.
    assert max(answer.meta["cached_tokens"] for answer in ran.answers[1]) > 0


@pytest.mark.parametrize("way", [way for way in WAYS if "draft" in way])
def test_drafts_are_made_and_taken(engines: Mapping[str, Future[Ran]], way: str) -> None:
    answers = [answer for asked in engines[way].result().answers for answer in asked]
    right, proposed = (
        sum(answer.meta[f"spec_num_{what}_drafts"] for answer in answers) for what in ("correct", "proposed")
    )
    # Of several drafts in a row the later ones are less often right.
    assert right / proposed >= (RIGHT if "1 draft" in way else RIGHT / 3)


@pytest.mark.parametrize("way", WAYS)
def test_no_kernel_of_ours_is_compiled_once_the_engine_is_ready(engines: Mapping[str, Future[Ran]], way: str) -> None:
    log = engines[way].result().log
    assert "late compiles are watched" in log
    assert [line for line in log.splitlines() if "compiled while requests waited" in line] == []
