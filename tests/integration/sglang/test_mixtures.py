"""Mixtures of experts in real SGLang give Hugging Face's greedy tokens, on one rank and on two."""

from __future__ import annotations

import pytest

from tests.integration.mixtures import NUM_TOKENS, PROMPTS, make_qwen3_moe
from tests.integration.sglang.offline import Ask, Engine, run

pytestmark = pytest.mark.sglang

WAYS = {
    "one rank": {},
    "every expert on two ranks": {"tp_size": 2},
    "four experts a rank": {"tp_size": 2, "ep_size": 2},
}
#: SGLang gives each rank a memory node of its own unless it is told which processor cores it has.
BOUND = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}


def test_tokens_are_hugging_faces(tmp_path):
    expected = make_qwen3_moe(tmp_path)
    ask = Ask(PROMPTS, {"max_new_tokens": NUM_TOKENS, "ignore_eos": True})
    engines = [
        Engine(str(tmp_path), True, [ask], {"dtype": "float32", **options}, BOUND if options else {})
        for options in WAYS.values()
    ]
    for way, ran in zip(WAYS, run(engines), strict=True):
        assert [answer.tokens for answer in ran.answers[0]] == expected, way
        assert "Qwen3MoeForCausalLM" in ran.log
