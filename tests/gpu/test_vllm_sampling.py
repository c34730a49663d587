"""vLLM's newer runner on a GPU with our sampler: greedy answers are native's, also where they must not end yet."""

from __future__ import annotations

import pytest

from tests.gpu.vllm_engines import engine, held_out
from tests.integration.vllm.offline import Ask, Ran, run

#: By name: what is asked beside the likeliest tokens. Trained answers are shorter than the least length.
ASKED = {
    "greedy": {"max_tokens": 32},
    "a least length": {"max_tokens": 32, "min_tokens": 24},
    "a penalty": {"max_tokens": 8, "presence_penalty": 0.5},
    "probabilities": {"max_tokens": 8, "logprobs": 2},
}


@pytest.fixture(scope="module")
def ran() -> tuple[Ran, Ran]:
    """Native and ours, one after the other."""
    prompts = [row["prompt"] for row in held_out()]
    asks = [Ask(prompts, sampling) for sampling in ASKED.values()]
    native, ours = run([engine("qwen3", impl, {}, asks) for impl in ("auto", "atom")])
    return native, ours


def test_the_kernel_is_chosen_with_the_sampler(ran: tuple[Ran, Ran]) -> None:
    native, ours = ran
    assert native.kernels == {}
    assert ours.kernels["greedy_tokens"] == "triton"


@pytest.mark.parametrize("asked", list(ASKED))
def test_tokens_are_natives(ran: tuple[Ran, Ran], asked: str) -> None:
    native, ours = (it.answers[list(ASKED).index(asked)] for it in ran)
    assert [answer.tokens for answer in ours] == [answer.tokens for answer in native]


def test_none_ends_before_its_least_length(ran: tuple[Ran, Ran]) -> None:
    plain, longer = (ran[1].answers[list(ASKED).index(asked)] for asked in ("greedy", "a least length"))
    assert min(len(answer.tokens) for answer in plain) < 24
    assert min(len(answer.tokens) for answer in longer) >= 24
