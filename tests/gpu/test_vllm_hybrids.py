"""vLLM on a GPU answers by trained hybrids, also what only states remember: with graphs, cached prefixes, drafts.

Each engine is asked several times: one prompt, a few at once, all at once, all once more from the prefix cache, prompts
whose last tokens come in a step of their own, as many as verify drafts, and many beside others that are given up. No
request waits for a kernel of ours to be compiled.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from transformers import AutoTokenizer

from benchmarks import CHECKPOINTS, ROOT
from tests.gpu.late_compiles import SCRIPT, late_compiles
from tests.gpu.vllm_engines import engine, held_out
from tests.integration.deepseek import RIGHT
from tests.integration.vllm.offline import Ask, Ran, run


@dataclass(frozen=True)
class Way:
    """An engine's."""

    family: str
    drafts: int = 0
    options: Mapping[str, Any] = field(default_factory=dict)
    runner: int | None = None

    @property
    def has_prefixes(self) -> bool:
        """Whether prefixes are cached, as they are by default."""
        return bool(self.options.get("enable_prefix_caching", True))

    @property
    def has_few_blocks(self) -> bool:
        """Whether requests lose what they have to others."""
        return FEW_BLOCKS.keys() <= self.options.keys()

    @property
    def num_last(self) -> int:
        """How many tokens a prompt has in its last step: as many as verify drafts."""
        return 1 + (self.drafts or 1)

    @property
    def is_warmed(self) -> bool:
        """Whether kernels are compiled before requests come; ``--enforce-eager`` switches that off."""
        return "enforce_eager" not in self.options


NO_PREFIXES, IN_STEP = {"enable_prefix_caching": False}, {"async_scheduling": False}
FULL, NONE = ({"compilation_config": {"cudagraph_mode": mode}} for mode in ("FULL", "NONE"))
SHORT_STEPS = {"max_num_batched_tokens": 256}
#: Prompts of four requests are computed side by side.
IN_PARTS = {**SHORT_STEPS, "long_prefill_token_threshold": 64}
#: Tokens of a prompt before its last ones: a step of one request, and four parts of four.
BEFORE = 256
#: So few that requests lose their blocks to others.
FEW_BLOCKS = {"num_gpu_blocks_override": 160}
#: The first word is the checkpoint's.
WAYS: Mapping[str, Way] = {
    "Next": Way("qwen3_next", 0, FEW_BLOCKS),
    "Next, full graphs, no prefixes": Way("qwen3_next", 0, {**FULL, **NO_PREFIXES}),
    "Next, no graphs, step by step": Way("qwen3_next", 0, {**NONE, **IN_STEP, **SHORT_STEPS}),
    "Next, 1 draft": Way("qwen3_next", 1),
    "Next, 3 drafts": Way("qwen3_next", 3, FEW_BLOCKS),
    "Next, 3 drafts, step by step": Way("qwen3_next", 3, IN_STEP),
    "Next, 3 drafts, full graphs, no prefixes": Way("qwen3_next", 3, {**FULL, **NO_PREFIXES, **IN_STEP, **IN_PARTS}),
    "Next, 1 draft, V1": Way("qwen3_next", 1, {**NO_PREFIXES, **IN_PARTS}, runner=1),
    "Next, 3 drafts, V1": Way("qwen3_next", 3, {**NO_PREFIXES, **IN_PARTS}, runner=1),
    "Next, 3 drafts, eager": Way("qwen3_next", 3, {"enforce_eager": True}),
    "3.5, step by step": Way("qwen3_5", 0, {**IN_STEP, "mamba_ssm_cache_dtype": "bfloat16"}),
    "3.5, 3 drafts": Way("qwen3_5", 3, {**SHORT_STEPS, "mamba_ssm_cache_dtype": "float32"}),
}
DRAFTS = {"qwen3_next": "AtomQwen3NextDraft", "qwen3_5": "AtomQwen35Draft"}


def _asked() -> list[tuple[str, str]]:
    """Prompts and their answers; the first ones ask what stands hundreds of tokens before."""
    lines = (ROOT / "tests" / "evaluation" / "recall.jsonl").read_text(encoding="utf-8").splitlines()
    return [(row["prompt"], row["answer"]) for row in (*map(json.loads, lines), *held_out())]


def _ends_behind(way: Way) -> tuple[str, str]:
    """A prompt of so many tokens that its last ones are as many as verify drafts, and its answer."""
    tokenizer, count = AutoTokenizer.from_pretrained(CHECKPOINTS / way.family), BEFORE + way.num_last
    for prompt, answer in _asked():
        missing = count - len(tokenizer(prompt).input_ids)
        if 0 <= missing < 10:
            padded = "\n" * missing + prompt
            assert len(tokenizer(padded).input_ids) == count
            return padded, answer
    raise AssertionError(f"no prompt is a little shorter than {count} tokens")


def _asks(way: Way) -> list[tuple[Ask, list[str]]]:
    """What an engine is asked in turn, and what the answers must begin with: all of them, but for the last time."""
    everything, last = _asked(), _ends_behind(way)
    rows = [everything[:1], everything[1:4], everything, everything, [last], [last] * 4]
    asks = [(Ask([prompt for prompt, _ in some], {"max_tokens": 32}), some) for some in rows]
    recall = everything[:100]
    prompts = [prompt for prompt, _ in recall]
    # Long enough that each of them needs another block.
    until = {"max_tokens": 64, "ignore_eos": True} if way.has_few_blocks else {"max_tokens": 32}
    asks.append((Ask(prompts, until, aborted=prompts[:40]), recall))
    return [(ask, [f" {answer}\n" for _, answer in some]) for ask, some in asks]


@pytest.fixture(scope="module")
def engines() -> Mapping[str, Future[Ran]]:
    """Every engine that the tests look at."""
    pool = ThreadPoolExecutor(len(WAYS))

    def start(way: Way) -> Ran:
        options = dict(way.options)
        if way.drafts:
            options["speculative_config"] = {"method": "mtp", "num_speculative_tokens": way.drafts}
        environ = {} if way.runner is None else {"VLLM_USE_V2_MODEL_RUNNER": str(way.runner - 1)}
        asked = replace(engine(way.family, "atom", options, [ask for ask, _ in _asks(way)]), stepped=True)
        return run([asked], environ=environ, deadline=560.0, script=SCRIPT)[0]

    return {name: pool.submit(start, way) for name, way in WAYS.items()}


@pytest.mark.parametrize("name", WAYS)
def test_every_answer_is_right(engines: Mapping[str, Future[Ran]], name: str) -> None:
    ran, way = engines[name].result(), WAYS[name]
    assert {"VllmPagedAttention", "VllmLinearAttention"} <= set(ran.layer_classes)
    assert ran.kernels["gated_delta_net"] == "triton"
    assert ran.draft_class == (DRAFTS[way.family] if way.drafts else None)
    for answers, (ask, expected) in zip(ran.answers, _asks(way), strict=True):
        assert len(answers) == len(expected)
        for answer, right in zip(answers, expected, strict=True):
            assert (answer.text[: len(right)] if ask.aborted else answer.text) == right


@pytest.mark.parametrize("name", WAYS)
def test_graphs_and_prefixes_are_those_that_were_asked_for(engines: Mapping[str, Future[Ran]], name: str) -> None:
    ran, way = engines[name].result(), WAYS[name]
    eager = "enforce_eager" in way.options or way.options.get("compilation_config") == NONE["compilation_config"]
    assert (ran.graph_mode == "NONE") == eager
    if way.options.get("compilation_config") is None and not eager:
        assert ran.graph_mode == "FULL_AND_PIECEWISE"
    assert (ran.counters["vllm:prefix_cache_hits"] > 0) == way.has_prefixes


@pytest.mark.parametrize("name", [name for name, way in WAYS.items() if way.has_few_blocks])
def test_requests_lose_their_states_and_come_back(engines: Mapping[str, Future[Ran]], name: str) -> None:
    assert engines[name].result().counters["vllm:num_preemptions"] > 0


@pytest.mark.parametrize("name", [name for name, way in WAYS.items() if IN_PARTS.keys() <= way.options.keys()])
def test_prompts_end_in_steps_that_look_like_drafts(engines: Mapping[str, Future[Ran]], name: str) -> None:
    """Of one request and of four; V1 replays full graphs of decodes for them (vllm#55766)."""
    steps, last = engines[name].result().steps, [BEFORE, WAYS[name].num_last, 1]
    assert [last] in steps
    assert [last] * 4 in steps


@pytest.mark.parametrize("name", [name for name, way in WAYS.items() if way.drafts])
def test_drafts_are_made_and_taken(engines: Mapping[str, Future[Ran]], name: str) -> None:
    counters = engines[name].result().counters
    accepted, drafted = (counters[f"vllm:spec_decode_num_{what}_tokens"] for what in ("accepted", "draft"))
    # Of several drafts in a row the later ones are less often right, and behind an answer's end few are.
    few = 0.1 if WAYS[name].has_few_blocks else RIGHT / 3
    assert accepted / drafted >= (RIGHT if WAYS[name].drafts == 1 else few)


@pytest.mark.parametrize("name", [name for name, way in WAYS.items() if way.is_warmed])
def test_no_kernel_of_ours_is_compiled_once_the_engine_is_ready(engines: Mapping[str, Future[Ran]], name: str) -> None:
    assert late_compiles(engines[name].result().log) == []
