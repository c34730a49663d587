"""`--enable-fp32-lm-head`: the head's product in float32, as SGLang's own model has it."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from tests.integration.isolation import before_all_else
from tests.integration.questions import checkpoint
from tests.integration.sglang.offline import Ask, Engine, Ran, drafting, run
from tests.integration.sglang.test_deepseek import ENVIRON

pytestmark = pytest.mark.sglang

#: Holds the one function of vLLM's that SGLang's own rope imports on a CPU.
STAND_INS = Path(__file__).with_name("stand_ins")
PROMPTS = ["Tom has 3 apples.", "How many are left when 12 of 40 are sold?", "Question:"]
LOGPROBS = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 6}
ASKS = [Ask(PROMPTS, {"max_new_tokens": 1}, LOGPROBS)]
FLOAT32 = {"enable_fp32_lm_head": True}
#: In which hidden states of two models come closer than in bfloat16.
FLOAT16 = {"dtype": "float16"}
TWO = {"tp_size": 2}
#: SGLang gives each rank a memory node of its own unless it is told which processor cores it has.
BOUND = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}
#: Of log probabilities in nats, half a step of float16 between 16 and 32: what the head's rounding moves a logit by.
ROUNDING = 2**-7
#: What other roundings of hidden states move them by.
SIXTEEN_BITS = 0.1


def logprobs(ran: Ran) -> list[dict[int, float]]:
    """Those of the likeliest tokens: of the first new one, and of each one of a prompt."""
    rows = [row for answer in ran.answers[0] for row in answer.meta["input_top_logprobs"] if row]
    rows += [answer.meta["output_top_logprobs"][0] for answer in ran.answers[0]]
    return [{token: value for value, token, _ in row} for row in rows]


def are_rounded(ran: Ran) -> bool:
    """Whether logits are numbers of float16: of those above a half, differences are whole steps of 1/2048."""
    values = [sorted(row.values(), reverse=True)[:3] for row in logprobs(ran)]
    steps = [2048 * (larger - smaller) for row in values for larger, smaller in pairwise(row)]
    return sum(abs(step - round(step)) < 0.1 for step in steps) > 0.9 * len(steps)


def distance(one: Ran, other: Ran) -> float:
    """Largest |difference| of log probabilities that both tell."""
    pairs = zip(logprobs(one), logprobs(other), strict=True)
    return max(abs(a[token] - b[token]) for a, b in pairs for token in a.keys() & b.keys())


def test_logits_are_not_rounded_and_close_to_sglangs_own():
    ways = [(False, FLOAT32), (True, {}), (True, FLOAT32)]
    engines = [Engine(checkpoint("qwen3"), ours, ASKS, {**FLOAT16, **options}) for ours, options in ways]
    native, rounded, wide = run(engines, environ=before_all_else(STAND_INS))
    assert are_rounded(rounded)
    assert not are_rounded(native)
    assert not are_rounded(wide)
    assert distance(wide, rounded) <= 2 * ROUNDING
    assert distance(wide, native) <= SIXTEEN_BITS


def test_on_two_ranks_with_a_tied_head():
    """The head is the embedding."""
    engines = [
        Engine(checkpoint("llama"), True, ASKS, {**FLOAT16, **FLOAT32, **options}, BOUND if options else {})
        for options in ({}, TWO)
    ]
    one, two = run(engines)
    assert not are_rounded(one)
    assert not are_rounded(two)
    assert distance(one, two) <= SIXTEEN_BITS


def test_with_drafts_by_layers_of_the_checkpoint():
    """Drafts are read off the target's head, in float32 too."""
    asks = [Ask(PROMPTS, {"max_new_tokens": 8, "ignore_eos": True}, LOGPROBS)]
    options = {**FLOAT16, **FLOAT32}
    engines = [Engine(checkpoint("deepseek_v3"), True, asks, it) for it in (options, drafting(1, **options))]
    plain, drafts = run(engines, environ=ENVIRON)
    assert not are_rounded(plain)
    assert not are_rounded(drafts)
    assert [it.tokens[0] for it in drafts.answers[0]] == [it.tokens[0] for it in plain.answers[0]]
