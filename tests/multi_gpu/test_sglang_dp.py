"""SGLang on two GPUs that have requests and a cache of their own and share the experts: the right tokens.

Many prompts at once, and one alone, whose step a rank without requests takes part in; with graphs and without, and with
drafts of DeepSeek V3's own layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import torch

from benchmarks import CHECKPOINTS
from tests.integration.deepseek import RIGHT
from tests.integration.questions import greedy_tokens, read_rows
from tests.integration.sglang.offline import Ask, Engine, Ran, run

EAGER = {"disable_cuda_graph": True}
#: Experts are whole on one rank each, and not in two parts.
WHOLE = {"ep_size": 2}


def _drafting(count: int, **options: Any) -> dict[str, Any]:
    return {
        "speculative_algorithm": "NEXTN",
        "speculative_num_steps": count,
        "speculative_eagle_topk": 1,
        "speculative_num_draft_tokens": count + 1,
        **options,
    }


WAYS: Mapping[tuple[str, str], dict[str, Any]] = {
    ("deepseek_v3", "graphs"): {},
    ("deepseek_v3", "graphs, whole experts"): WHOLE,
    ("deepseek_v3", "graphs of decodes alone"): {"cuda_graph_backend_prefill": "disabled"},
    ("deepseek_v3", "eager"): EAGER,
    ("deepseek_v3", "pages of 64, chunks of 64"): {"page_size": 64, "chunked_prefill_size": 128},  # of both ranks
    ("deepseek_v3", "drafts of 1"): _drafting(1),
    ("deepseek_v3", "drafts of 3, whole experts"): _drafting(3, **WHOLE),
    ("deepseek_v3", "drafts of 3, eager"): _drafting(3, **EAGER),
    ("qwen3_moe", "graphs"): {},
    ("qwen3_moe", "eager, whole experts"): {**EAGER, **WHOLE},
}
NUM_PROMPTS = 100
#: That are asked one by one.
NUM_ALONE = 3


@pytest.fixture(scope="module")
def engines() -> Mapping[tuple[str, str], Future[Ran]]:
    """Every engine that the tests look at; five at a time, each on both GPUs."""
    if torch.cuda.device_count() < 2:
        pytest.skip("it takes 2 GPUs")
    shared = {"device": "cuda", "sampling_backend": "pytorch", "context_length": 1024, "max_running_requests": 64}
    limits = {"max_total_tokens": 65536, "mem_fraction_static": 0.9, "tp_size": 2, "attn_dp_size": 2}
    prompts = [row.prompt for row in read_rows()[:NUM_PROMPTS]]
    many = Ask(prompts)
    asks = [many, many, *(Ask([prompt]) for prompt in prompts[:NUM_ALONE])]  # the second time from the prefix cache
    pool = ThreadPoolExecutor(5)

    def start(index: int, key: tuple[str, str]) -> Ran:
        options = {**shared, **limits, "port": 12000 + 400 * index, **WAYS[key]}
        return run([Engine(str(CHECKPOINTS / key[0]), True, asks, options)], deadline=560.0)[0]

    return {key: pool.submit(start, index, key) for index, key in enumerate(WAYS)}


@pytest.mark.parametrize(("family", "way"), WAYS)
def test_tokens_are_the_right_ones(engines: Mapping[tuple[str, str], Future[Ran]], family: str, way: str) -> None:
    ran = engines[family, way].result()
    expected = greedy_tokens(family, read_rows()[:NUM_PROMPTS])
    many, again, *alone = ([answer.tokens for answer in answers] for answers in ran.answers)
    assert many == expected
    assert again == expected
    assert alone == [[tokens] for tokens in expected[:NUM_ALONE]]
    assert {answer.meta["dp_rank"] for answer in ran.answers[0]} == {0, 1}


@pytest.mark.parametrize("way", [way for _, way in WAYS if "drafts" in way])
def test_drafts_are_made_and_taken(engines: Mapping[tuple[str, str], Future[Ran]], way: str) -> None:
    ran = engines["deepseek_v3", way].result()
    assert "atom-plugin drafts for" in ran.log
    answers = [answer for asked in ran.answers for answer in asked]
    right, proposed = (
        sum(answer.meta[f"spec_num_{what}_drafts"] for answer in answers) for what in ("correct", "proposed")
    )
    # Of several drafts in a row the later ones are less often right.
    assert right / proposed >= (RIGHT if way == "drafts of 1" else RIGHT / 3)
