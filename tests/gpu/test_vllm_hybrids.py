"""vLLM on a GPU answers by trained hybrids, also what only states remember: with graphs, cached prefixes, drafts.

Each engine is asked four times: one prompt, a few at once, all at once, and all once more from the prefix cache. No
request waits for a kernel of ours to be compiled.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import pytest

from benchmarks import ROOT
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
    def is_warmed(self) -> bool:
        """Whether kernels are compiled before requests come; ``--enforce-eager`` switches that off."""
        return "enforce_eager" not in self.options


NO_PREFIXES, IN_STEP = {"enable_prefix_caching": False}, {"async_scheduling": False}
FULL, NONE = ({"compilation_config": {"cudagraph_mode": mode}} for mode in ("FULL", "NONE"))
SHORT_STEPS = {"max_num_batched_tokens": 256}
#: The first word is the checkpoint's.
WAYS: Mapping[str, Way] = {
    "Next": Way("qwen3_next"),
    "Next, full graphs, no prefixes": Way("qwen3_next", 0, {**FULL, **NO_PREFIXES}),
    "Next, no graphs, step by step": Way("qwen3_next", 0, {**NONE, **IN_STEP, **SHORT_STEPS}),
    "Next, 1 draft": Way("qwen3_next", 1),
    "Next, 3 drafts": Way("qwen3_next", 3),
    "Next, 3 drafts, full graphs, no prefixes": Way("qwen3_next", 3, {**FULL, **NO_PREFIXES, **IN_STEP}),
    "Next, 3 drafts, V1": Way("qwen3_next", 3, NO_PREFIXES, runner=1),
    "Next, 3 drafts, eager": Way("qwen3_next", 3, {"enforce_eager": True}),
    "3.5, step by step": Way("qwen3_5", 0, {**IN_STEP, "mamba_ssm_cache_dtype": "bfloat16"}),
    "3.5, 3 drafts": Way("qwen3_5", 3, {**SHORT_STEPS, "mamba_ssm_cache_dtype": "float32"}),
}
DRAFTS = {"qwen3_next": "AtomQwen3NextDraft", "qwen3_5": "AtomQwen35Draft"}


def _asked() -> list[tuple[str, str]]:
    """Prompts and their answers; the first ones ask what stands hundreds of tokens before."""
    lines = (ROOT / "tests" / "evaluation" / "recall.jsonl").read_text(encoding="utf-8").splitlines()
    return [(row["prompt"], row["answer"]) for row in (*map(json.loads, lines), *held_out())]


@pytest.fixture(scope="module")
def engines() -> Mapping[str, Future[Ran]]:
    """Every engine that the tests look at."""
    prompts = [prompt for prompt, _ in _asked()]
    asks = [Ask(some, {"max_tokens": 32}) for some in (prompts[:1], prompts[1:4], prompts, prompts)]
    pool = ThreadPoolExecutor(len(WAYS))

    def start(way: Way) -> Ran:
        options = dict(way.options)
        if way.drafts:
            options["speculative_config"] = {"method": "mtp", "num_speculative_tokens": way.drafts}
        environ = {} if way.runner is None else {"VLLM_USE_V2_MODEL_RUNNER": str(way.runner - 1)}
        return run([engine(way.family, "atom", options, asks)], environ=environ, deadline=560.0, script=SCRIPT)[0]

    return {name: pool.submit(start, way) for name, way in WAYS.items()}


@pytest.mark.parametrize("name", WAYS)
def test_every_answer_is_right(engines: Mapping[str, Future[Ran]], name: str) -> None:
    ran, way = engines[name].result(), WAYS[name]
    assert {"VllmPagedAttention", "VllmLinearAttention"} <= set(ran.layer_classes)
    assert ran.kernels["gated_delta_net"] == "triton"
    assert ran.draft_class == (DRAFTS[way.family] if way.drafts else None)
    expected = [f" {answer}\n" for _, answer in _asked()]
    for asked, right in zip(ran.answers, (expected[:1], expected[1:4], expected, expected), strict=True):
        assert [answer.text for answer in asked] == right


@pytest.mark.parametrize("name", WAYS)
def test_graphs_and_prefixes_are_those_that_were_asked_for(engines: Mapping[str, Future[Ran]], name: str) -> None:
    ran, way = engines[name].result(), WAYS[name]
    eager = "enforce_eager" in way.options or way.options.get("compilation_config") == NONE["compilation_config"]
    assert (ran.graph_mode == "NONE") == eager
    if way.options.get("compilation_config") is None and not eager:
        assert ran.graph_mode == "FULL_AND_PIECEWISE"
    assert (ran.counters["vllm:prefix_cache_hits"] > 0) == way.has_prefixes


@pytest.mark.parametrize("name", [name for name, way in WAYS.items() if way.drafts])
def test_drafts_are_made_and_taken(engines: Mapping[str, Future[Ran]], name: str) -> None:
    counters = engines[name].result().counters
    accepted, drafted = (counters[f"vllm:spec_decode_num_{what}_tokens"] for what in ("accepted", "draft"))
    # Of several drafts in a row the later ones are less often right.
    assert accepted / drafted >= (RIGHT if WAYS[name].drafts == 1 else RIGHT / 3)


@pytest.mark.parametrize("name", [name for name, way in WAYS.items() if way.is_warmed])
def test_no_kernel_of_ours_is_compiled_once_the_engine_is_ready(engines: Mapping[str, Future[Ran]], name: str) -> None:
    assert late_compiles(engines[name].result().log) == []
