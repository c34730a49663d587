"""Mixtures of experts in real SGLang give Hugging Face's greedy tokens, on one rank and on two."""

from __future__ import annotations

from typing import Any

import pytest

from tests.integration.mixtures import NUM_TOKENS, PROMPTS, make_mixture
from tests.integration.sglang.offline import Ask, Engine, run

pytestmark = pytest.mark.sglang

#: One rank; every expert on two ranks; four experts a rank.
ONE: dict[str, Any] = {}
PARTS: dict[str, Any] = {"tp_size": 2}
WHOLE = {"tp_size": 2, "ep_size": 2}
#: SGLang lists the backends that GPT-OSS may be run on.
NAMED = {**PARTS, "attention_backend": "atom"}
ENGINES = {"qwen3_moe": (ONE, WHOLE), "mixtral": (PARTS,), "glm4_moe": (ONE, WHOLE), "gpt_oss": (ONE, NAMED, WHOLE)}
#: SGLang gives each rank a memory node of its own unless it is told which processor cores it has.
BOUND = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}


@pytest.mark.parametrize("family", ENGINES)
def test_tokens_are_hugging_faces(tmp_path, family):
    expected = make_mixture(tmp_path, family)
    ask = Ask(PROMPTS, {"max_new_tokens": NUM_TOKENS, "ignore_eos": True})
    engines = [
        Engine(str(tmp_path), True, [ask], {"dtype": "float32", **options}, BOUND if options else {})
        for options in ENGINES[family]
    ]
    for engine, ran in zip(engines, run(engines), strict=True):
        assert [answer.tokens for answer in ran.answers[0]] == expected, engine.options
        assert "atom-plugin serves" in ran.log
