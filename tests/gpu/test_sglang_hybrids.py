"""SGLang on a GPU answers by trained hybrids, also what only states remember: with graphs, copies of states, drafts.

Each engine is asked three times: all prompts, the same from the prefix cache, and the longest ones past the ends of
their answers, while others run that are given up. Some have little room, so requests are put off and begin again. No
request waits for a kernel of ours to be compiled.
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
NO_COPIES = {"mamba_radix_cache_strategy": "no_buffer", "disable_overlap_schedule": True}
#: For some of the prompts that :data:`FEWER` admits, which grow until requests are put off; each 16th step puts one off
#: too, so that there are some for sure.
LITTLE_ROOM = {"max_total_tokens": 8192, "schedule_conservativeness": 0.01}
RETRACTING = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "16"}
WAYS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "Next": ("qwen3_next", {}),
    "Next, eager": ("qwen3_next", {"disable_cuda_graph": True}),
    "Next, no copies": ("qwen3_next", {**NO_COPIES, **LITTLE_ROOM, "chunked_prefill_size": 64}),
    "Next, no copies, 3 drafts": ("qwen3_next", drafting(3, **FEWER, **NO_COPIES, chunked_prefill_size=64)),
    "Next, SGLang's attention": ("qwen3_next", {"attention_backend": "triton"}),
    "Next, 3 drafts": ("qwen3_next", drafting(3, **FEWER, **LITTLE_ROOM)),
    "Next, 3 drafts, eager": ("qwen3_next", drafting(3, **FEWER, disable_cuda_graph=True)),
    "3.5": ("qwen3_5", {"page_size": 64, "chunked_prefill_size": 64, "mamba_ssm_dtype": "bfloat16"}),
    "3.5, 1 draft": ("qwen3_5", drafting(1, **FEWER, **LITTLE_ROOM, page_size=16, mamba_track_interval=64)),
}
NUM_PROMPTS = 200
#: Prompts, the first ones, that are asked for more tokens than their answers have; and how many run beside them.
NUM_LONG, NUM_ABORTED = 100, 8
PAST_THE_END = {"max_new_tokens": 64, "min_new_tokens": 64}


def _asked() -> list[tuple[str, str]]:
    """Prompts and their answers."""
    lines = (ROOT / "tests" / "evaluation" / "recall.jsonl").read_text(encoding="utf-8").splitlines()
    remembered = [(row["prompt"], row["answer"]) for row in map(json.loads, lines)]
    return [*remembered, *((row.prompt, row.answer) for row in read_rows()[:NUM_PROMPTS])]


def _has_little_room(way: str) -> bool:
    return WAYS[way][1].items() >= LITTLE_ROOM.items()


@pytest.fixture(scope="module")
def engines() -> Mapping[str, Future[Ran]]:
    """Every engine that the tests look at."""
    shared = {"device": "cuda", "sampling_backend": "pytorch", "context_length": 2048, "max_running_requests": 64}
    limits = {"max_total_tokens": 65536, "max_mamba_cache_size": 512, "mem_fraction_static": 0.9}
    prompts = [prompt for prompt, _ in _asked()]
    # The second time from the prefix cache, where that has room for all.
    longest = prompts[:NUM_LONG]
    asks = [Ask(prompts), Ask(prompts), Ask(longest, PAST_THE_END, aborted=longest[-NUM_ABORTED:])]
    watched = os.pathsep.join([str(Path(__file__).with_name("late_on_sglang")), os.environ.get("PYTHONPATH", "")])
    pool = ThreadPoolExecutor(4)

    def start(index: int, way: str) -> Ran:
        family, options = WAYS[way]
        given = {**shared, **limits, "port": 38000 + 200 * index, **options}
        environ = {"PYTHONPATH": watched, **(RETRACTING if _has_little_room(way) else {})}
        engine = Engine(str(CHECKPOINTS / family), True, asks, given, environ)
        return run([engine], deadline=560.0)[0]

    return {way: pool.submit(start, index, way) for index, way in enumerate(WAYS)}


@pytest.mark.parametrize("way", WAYS)
def test_every_answer_is_right(engines: Mapping[str, Future[Ran]], way: str) -> None:
    ran = engines[way].result()
    assert "atom-plugin serves" in ran.log
    expected = [f" {answer}\n" for _, answer in _asked()]
    *same, longer = ran.answers
    for answers in same:
        assert [answer.text for answer in answers] == expected
    assert [answer.text[: len(text)] for answer, text in zip(longer, expected, strict=False)] == expected[:NUM_LONG]
    # A state is kept where a chunk or an interval of tokens ends, so short prompts have none.
    if _has_little_room(way):
        assert sum(answer.meta["num_retractions"] for answer in longer) > 0
    else:
        assert max(answer.meta["cached_tokens"] for answer in ran.answers[1]) > 0


@pytest.mark.parametrize("way", [way for way in WAYS if "draft" in way])
def test_drafts_are_made_and_taken(engines: Mapping[str, Future[Ran]], way: str) -> None:
    # Past the ends of answers models are not sure.
    answers = [answer for asked in engines[way].result().answers[:2] for answer in asked]
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
