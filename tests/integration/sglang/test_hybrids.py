"""Models with two kinds of attention in real SGLang: the tokens are Transformers', however requests come and are kept.

Each engine is asked the same: a prompt alone, cold and warm; many at once, some of which share a prefix with one that
runs; many with neighbours that are given up. It has room for a few requests and states only, so some are put off, and
slots are used again, in which the request before has left NaN. What SGLang lacks on a CPU is in `snapshots_on_cpu`
(copies of states for prefixes) and `chains_on_cpu` (drafts).
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.hybrid_checkpoints import Expected, make_hybrid, some_tokens
from tests.integration.sglang.offline import Ask, Engine, drafting, run
from tests.integration.sglang.test_drafts import ENVIRON, STAND_INS

pytestmark = pytest.mark.sglang

SNAPSHOTS = Path(__file__).parent / "snapshots_on_cpu"
COUNT = 32
SHARED = some_tokens(150, 99)
LENGTHS = (1, 7, 63, 64, 65, 130, 100, 33, 20, 5, 48)
PROMPTS = [*(some_tokens(length, length) for length in LENGTHS), *([*SHARED, last] for last in range(5))]
ALONE = [*SHARED, 9, 8, 7]
GIVEN_UP = [[*SHARED, 3], some_tokens(90, 7), some_tokens(40, 8)]
# With `ignore_eos` SGLang knows how much a request will need, and puts none off.
EXACTLY = {"max_new_tokens": COUNT, "min_new_tokens": COUNT}
ASKS = [Ask([ALONE], EXACTLY), Ask([ALONE], EXACTLY), Ask(PROMPTS, EXACTLY), Ask(PROMPTS, EXACTLY, aborted=GIVEN_UP)]
OPTIONS = {
    "dtype": "float32",
    "disable_cuda_graph": True,
    "chunked_prefill_size": 64,
    "max_total_tokens": 800,
    "max_running_requests": 16,
    "schedule_conservativeness": 0.01,
}


@dataclass(frozen=True)
class Cell:
    """How an engine keeps states, and how many tokens are drafted in a row."""

    family: str
    strategy: str
    drafts: int
    overlap: bool = True
    page_size: int = 1

    def __str__(self) -> str:
        return f"{self.family}-{self.strategy}-{self.drafts}-{'overlap' if self.overlap else 'in turn'}"

    def engine(self, folder: Path) -> Engine:
        """The engine, with its asks."""
        copies = self.strategy != "no_buffer"
        options = {
            **OPTIONS,
            "mamba_radix_cache_strategy": self.strategy,
            "disable_overlap_schedule": not self.overlap,
            "max_mamba_cache_size": 80 if copies else 48,
            "mamba_track_interval": 64,
            "page_size": self.page_size,
        }
        options = drafting(self.drafts, **options) if self.drafts else options
        stand_ins = (*STAND_INS, SNAPSHOTS) if self.drafts else (SNAPSHOTS,)
        environ = {
            **(ENVIRON if self.drafts else {}),
            "PYTHONPATH": os.pathsep.join([*map(str, stand_ins), os.environ.get("PYTHONPATH", "")]),
            "SGLANG_MAMBA_CONV_DTYPE": "float32",
        }
        return Engine(str(folder), True, ASKS, options, environ)


CELLS = [
    Cell("qwen3_next", "no_buffer", 0, overlap=False),
    Cell("qwen3_next", "extra_buffer", 3),
    Cell("qwen3_5", "extra_buffer", 0),
    Cell("qwen3_5", "extra_buffer", 1, overlap=False),
    Cell("qwen3_5_moe_vl", "no_buffer", 3, overlap=False),
    Cell("qwen3_5_moe", "extra_buffer_lazy", 0, page_size=16),
]

# As Transformers saves it, and without full attention in each fourth layer, which SGLang would take for granted.
ALTERNATING = {"layer_types": ["linear_attention", "full_attention"] * 2, "extra": {"num_nextn_predict_layers": 1}}
CHANGES = {"qwen3_next": ALTERNATING}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The folder of a family's checkpoint, and what Transformers answers: to ALONE and to PROMPTS."""
    known = {}

    def make(family):
        if family not in known:
            folder = make_hybrid(tmp_path_factory.mktemp("hybrid") / family, family, **CHANGES.get(family, {}))
            expected = Expected.of(folder)
            known[family] = folder, [expected.greedy(prompt, COUNT) for prompt in (ALONE, *PROMPTS)]
        return known[family]

    return make


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_tokens_are_transformers(cell, made):
    folder, (alone, *many) = made(cell.family)
    (ran,) = run([cell.engine(folder)])
    *_, first, second = ran.answers
    assert [[answer.tokens for answer in answers] for answers in ran.answers] == [[alone], [alone], many, many]
    assert "SglangRadixAttention" in ran.log
    assert "atom-plugin serves" in ran.log
    cached = [[answer.meta["cached_tokens"] for answer in answers] for answers in ran.answers]
    assert cached[0] == [0]
    assert cached[1][0] >= 64
    assert max(cached[2][-5:]) >= 64
    assert sum(count > 0 for count in cached[3]) > 2
    assert sum(answer.meta["num_retractions"] for answer in (*first, *second)) > 0
    if cell.drafts:
        right, proposed = (
            sum(answer.meta[name] for answer in (*first, *second))
            for name in ("spec_num_correct_drafts", "spec_num_proposed_drafts")
        )
        assert 0 < right < proposed
