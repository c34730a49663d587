"""Models with two kinds of attention in real SGLang: the tokens are Transformers', however requests come and are kept.

Each engine is asked the same: a prompt alone, cold and warm; many at once, some of which share a prefix with a request
that runs and is given up; the same again. It has room for a few requests and states only, so some are put off, and
slots are used again, in which the request before has left NaN. What SGLang lacks on a CPU is in `snapshots_on_cpu`
(copies of states for prefixes) and `chains_on_cpu` (drafts).
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.hybrid_checkpoints import Expected, make_hybrid, some_tokens
from tests.integration.questions import checkpoint, greedy_tokens
from tests.integration.server import free_ports
from tests.integration.sglang.offline import Ask, Engine, drafting, run
from tests.integration.sglang.test_dp_attention import DERIVED, PINNED
from tests.integration.sglang.test_drafts import ENVIRON, STAND_INS
from tests.integration.sglang.test_mixtures import BOUND

pytestmark = pytest.mark.sglang

SNAPSHOTS = Path(__file__).parent / "snapshots_on_cpu"
RECALL = Path(__file__).parents[2] / "evaluation" / "recall.jsonl"
COUNT = 32
SHARED = some_tokens(150, 99)
LENGTHS = (1, 7, 63, 64, 65, 130, 100, 33, 20, 5, 48)
PROMPTS = [*([*SHARED, last] for last in range(5)), *(some_tokens(length, length) for length in LENGTHS)]
ALONE = some_tokens(153, 98)
#: Nothing has ended that the first one shares its prefix with.
GIVEN_UP = [[*SHARED, 3], some_tokens(90, 7), some_tokens(40, 8)]
# With `ignore_eos` SGLang knows how much a request will need, and puts none off.
EXACTLY = {"max_new_tokens": COUNT, "min_new_tokens": COUNT}
ASKS = [*[Ask([ALONE], EXACTLY)] * 2, *[Ask(PROMPTS, EXACTLY, aborted=GIVEN_UP)] * 2]
OPTIONS = {
    "dtype": "float32",
    "disable_cuda_graph": True,
    "chunked_prefill_size": 64,
    "max_total_tokens": 800,
    "max_running_requests": 16,
    "schedule_conservativeness": 0.01,
}
#: SGLang puts a request off in each eighth step, whether there is room or not; it is without some now and then anyway.
RETRACTING = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "8"}


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
        return Engine(str(folder), True, ASKS, options, {**environ_of(SNAPSHOTS, self.drafts), **RETRACTING})


def environ_of(plugin: Path | str, drafts: int) -> dict[str, str]:
    """Variables of an engine with a plug-in, whose states are float32, and which drafts."""
    plugins = (*STAND_INS, plugin) if drafts else (plugin,)
    path = os.pathsep.join([*map(str, plugins), os.environ.get("PYTHONPATH", "")])
    return {**(ENVIRON if drafts else {}), "PYTHONPATH": path, "SGLANG_MAMBA_CONV_DTYPE": "float32"}


CELLS = [
    Cell("qwen3_next", "no_buffer", 0, overlap=False),
    Cell("qwen3_next", "extra_buffer", 3),
    Cell("qwen3_next", "extra_buffer", 3, overlap=False),
    Cell("qwen3_5", "extra_buffer", 0),
    Cell("qwen3_5", "extra_buffer", 0, overlap=False),
    Cell("qwen3_5", "extra_buffer", 1),
    Cell("qwen3_5", "extra_buffer", 1, overlap=False),
    Cell("qwen3_5", "no_buffer", 1, overlap=False),
    Cell("qwen3_5_moe_vl", "no_buffer", 3, overlap=False),
    Cell("qwen3_5_moe", "extra_buffer_lazy", 1, page_size=16),
]

# As Transformers saves it, and without full attention in each fourth layer, which SGLang would take for granted.
ALTERNATING = {"layer_types": ["linear_attention", "full_attention"] * 2, "extra": {}}
CHANGES = {"qwen3_next": ALTERNATING}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The folder of a family's checkpoint, and what Transformers answers: to ALONE and to PROMPTS."""
    known = {}

    def make(family):
        if family not in known:
            folder = make_hybrid(tmp_path_factory.mktemp("hybrid") / family, family, **CHANGES.get(family, {}))
            known[family] = folder, Expected.of(folder).greedy((ALONE, *PROMPTS), COUNT)
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
    assert f"'disable_overlap_schedule': {not cell.overlap}" in ran.log
    cached = [[answer.meta["cached_tokens"] for answer in answers] for answers in ran.answers]
    assert cached[0] == [0]
    assert cached[1][0] >= 64
    assert cached[2][0] >= 64
    assert sum(count > 0 for count in cached[3]) > 2
    for answers in (first, second):
        assert sum(answer.meta["num_retractions"] for answer in answers) > 0
    if cell.drafts:
        right, proposed = (
            sum(answer.meta[name] for answer in (*first, *second))
            for name in ("spec_num_correct_drafts", "spec_num_proposed_drafts")
        )
        assert 0 < right < proposed


#: By name: the family, the ranks, and how many tokens are drafted in a row.
RANKS = {
    "two stages": ("qwen3_5", {"pp_size": 2}, 0),
    "two ranks": ("qwen3_5_moe", {"tp_size": 2}, 2),
    "attention of their own": ("qwen3_next", {"tp_size": 2, "attn_dp_size": 2, "ep_size": 2}, 1),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", RANKS)
def test_ranks_have_the_tokens_of_one(name, made):
    family, ranks, drafts = RANKS[name]
    folder, (alone, *many) = made(family)
    plain = {key: OPTIONS[key] for key in ("dtype", "disable_cuda_graph", "chunked_prefill_size")}
    options = {**plain, **ranks, "max_total_tokens": 4096, "port": free_ports(DERIVED)}
    options = drafting(drafts, **options) if drafts else options
    # One prompt alone leaves a rank without requests.
    engine = Engine(str(folder), True, ASKS[1:3], options, {**environ_of(PINNED, drafts), **BOUND})
    (ran,) = run([engine])
    assert [[answer.tokens for answer in answers] for answers in ran.answers] == [[alone], many]
    assert max(answer.meta["cached_tokens"] for answer in ran.answers[1]) >= 64


@pytest.mark.slow
@pytest.mark.parametrize(("family", "attention"), [("qwen3_next", "atom"), ("qwen3_5", "torch_native")])
def test_held_out_questions_are_answered_right(family, attention, rows):
    asked = rows[:64]
    (ran,) = run(
        [Engine(checkpoint(family), True, [Ask([row.prompt for row in asked])], {"attention_backend": attention})]
    )
    assert [answer.tokens for answer in ran.answers[0]] == greedy_tokens(family, asked)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5"])
def test_what_only_states_remember_is_answered_with_drafts_and_from_copies(family):
    """In bfloat16, as checkpoints are; what is asked for stands hundreds of tokens before, beyond attention's sight."""
    rows = [json.loads(line) for line in RECALL.read_text(encoding="utf-8").splitlines()][:40]
    ask = Ask([row["prompt"] for row in rows], {"max_new_tokens": 8})
    options = {"mamba_radix_cache_strategy": "extra_buffer", "chunked_prefill_size": 256, "disable_cuda_graph": True}
    environ = {**environ_of(SNAPSHOTS, 1), "SGLANG_MAMBA_CONV_DTYPE": "bfloat16"}
    (ran,) = run([Engine(checkpoint(family), True, [ask, ask], drafting(1, **options), environ)])
    for answers in ran.answers:
        texts = [answer.text for answer in answers]
        assert all(text.startswith(f" {row['answer']}\n") for text, row in zip(texts, rows, strict=True)), texts
    assert min(answer.meta["cached_tokens"] for answer in ran.answers[1]) >= 64
    right, proposed = (
        sum(answer.meta[name] for answers in ran.answers for answer in answers)
        for name in ("spec_num_correct_drafts", "spec_num_proposed_drafts")
    )
    assert right > 0.9 * proposed
