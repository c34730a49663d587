"""vLLM's newer runner on a GPU with our sampler: greedy answers are native's and those of vLLM's sampler."""

from __future__ import annotations

import pytest

from tests.gpu.late_compiles import SCRIPT, late_compiles
from tests.gpu.vllm_engines import engine, held_out
from tests.integration.vllm.offline import Ask, Ran, run

#: Trained answers are shorter.
LONGER = {"max_tokens": 32, "min_tokens": 24}
#: By name: what is asked beside the likeliest tokens. Whoever wants probabilities is served by vLLM's own sampler.
ASKED = {
    "greedy": {"max_tokens": 32},
    "a least length": LONGER,
    "a least length, by vLLM's sampler": {**LONGER, "logprobs": 1},
    "a penalty": {"max_tokens": 8, "presence_penalty": 0.5},
    "probabilities": {"max_tokens": 8, "logprobs": 2},
}


@pytest.fixture(scope="module")
def ran() -> tuple[Ran, Ran]:
    """Native and ours, which is the first one."""
    prompts = [row["prompt"] for row in held_out()]
    asks = [Ask(prompts, sampling) for sampling in ASKED.values()]
    engines = [engine("qwen3", impl, {}, asks) for impl in ("atom", "auto")]
    ours, native = run(engines, script=SCRIPT)
    return native, ours


def test_the_kernel_is_chosen_with_the_sampler(ran: tuple[Ran, Ran]) -> None:
    native, ours = ran
    assert native.kernels == {}
    assert ours.kernels["greedy_tokens"] == "triton"


def test_no_kernel_of_ours_is_compiled_once_the_engine_is_ready(ran: tuple[Ran, Ran]) -> None:
    assert late_compiles(ran[1].log) == []


def _tokens(ran: Ran, asked: str) -> list[list[int]]:
    return [answer.tokens for answer in ran.answers[list(ASKED).index(asked)]]


@pytest.mark.parametrize("asked", ["greedy", "a penalty", "probabilities"])
def test_tokens_are_natives(ran: tuple[Ran, Ran], asked: str) -> None:
    native, ours = ran
    assert _tokens(ours, asked) == _tokens(native, asked)


def test_tokens_are_those_of_vllms_sampler(ran: tuple[Ran, Ran]) -> None:
    """In the same engine: behind what a model was trained to say, native's logits part from ours."""
    assert _tokens(ran[1], "a least length") == _tokens(ran[1], "a least length, by vLLM's sampler")


def test_none_ends_before_its_least_length(ran: tuple[Ran, Ran]) -> None:
    plain, longer = (_tokens(ran[1], asked) for asked in ("greedy", "a least length"))
    assert min(map(len, plain)) < 24
    assert min(map(len, longer)) >= 24
