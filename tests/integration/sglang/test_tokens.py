"""Greedy tokens are those of Hugging Face's model, for every family and on every path through our code."""

from __future__ import annotations

from typing import Any

import pytest

from atom_core.kernels import OPS
from tests.integration.questions import FAMILIES, MAX_TOKENS, checkpoint, right_tokens
from tests.integration.sglang.offline import Ask, Engine, run

pytestmark = pytest.mark.sglang

NUM_FEW = 64
CHUNK = 64
MIXED_CHUNKS = {"page_size": 16, "chunked_prefill_size": CHUNK, "enable_mixed_chunk": True}
LARGE_PAGES = {"qwen3": {"page_size": 64}, "mistral": {"page_size": 1024}}
PLAIN = {"disable_radix_cache": True, "disable_overlap_schedule": True}
FRAMEWORK_ATTENTION = {"attention_backend": "torch_native"}
REFERENCE_KERNELS = ",".join(f"{op.name}={op.implementations[-1].name}" for op in OPS)
# On a CPU each rank needs cores of its own.
TWO_RANKS = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}


def few(family: str, rows: Any, **options: Any) -> Engine:
    return Engine(checkpoint(family), True, [Ask([row.prompt for row in rows[:NUM_FEW]])], options)


@pytest.fixture(scope="module")
def expected(hugging_face, rows):
    """Hugging Face's tokens for the first questions, by family."""
    prompts = [row.prompt for row in rows[:NUM_FEW]]
    return {family: [hugging_face(family).greedy(prompt, MAX_TOKENS) for prompt in prompts] for family in FAMILIES}


def tokens(answers):
    return [answer.tokens for answer in answers]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_held_out_question_is_answered_right_also_from_the_prefix_cache(family, expected, rows):
    prompts = [row.prompt for row in rows]
    (ran,) = run([Engine(checkpoint(family), True, [Ask(prompts), Ask(prompts[:NUM_FEW])])])
    assert f"atom-plugin serves {checkpoint(family)}" in ran.log
    assert "attention  SglangRadixAttention" in ran.log
    first, again = ran.answers
    assert [answer.text for answer in first] == [f" {row.answer}\n" for row in rows]
    assert tokens(first) == right_tokens(family, rows)
    assert tokens(first[:NUM_FEW]) == tokens(again) == expected[family]
    assert all(answer.meta["cached_tokens"] == answer.meta["prompt_tokens"] - 1 for answer in again)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3", "mistral"])
def test_pages_and_chunks_give_the_same_tokens(family, expected, rows):
    chunked, paged = run([few(family, rows, **MIXED_CHUNKS), few(family, rows, **LARGE_PAGES[family], **PLAIN)])
    assert tokens(chunked.answers[0]) == expected[family]
    assert f"#new-token: {CHUNK}," in chunked.log
    assert tokens(paged.answers[0]) == expected[family]
    assert not any(answer.meta["cached_tokens"] for answer in paged.answers[0])


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3", "mistral"])
def test_sglangs_attention_and_reference_kernels_give_the_same_tokens(family, expected, rows):
    asks = [Ask([row.prompt for row in rows[:NUM_FEW]])]
    framework, reference = run(
        [
            Engine(checkpoint(family), True, asks, FRAMEWORK_ATTENTION),
            Engine(checkpoint(family), True, asks, environ={"ATOM_KERNELS": REFERENCE_KERNELS}),
        ]
    )
    assert "attention  FrameworkAttention" in framework.log
    assert tokens(framework.answers[0]) == expected[family]
    assert "attention  SglangRadixAttention" in reference.log
    assert reference.log.count("forced by ATOM_KERNELS") >= 5
    assert tokens(reference.answers[0]) == expected[family]


@pytest.mark.slow
def test_two_ranks_and_two_stages_give_the_tokens_of_one(expected, rows):
    engines = [few("qwen3", rows, tp_size=2), few("qwen3", rows, pp_size=2)]
    for ran in run(engines, environ=TWO_RANKS):
        assert "attention  SglangRadixAttention" in ran.log
        assert tokens(ran.answers[0]) == expected["qwen3"]
