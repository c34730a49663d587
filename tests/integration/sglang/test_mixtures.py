"""Mixtures of experts in real SGLang give Hugging Face's greedy tokens, on one rank and on two."""

from __future__ import annotations

import pytest

from tests.integration.mixtures import NUM_TOKENS, PROMPTS, make_mixture
from tests.integration.sglang.offline import Ask, Engine, run

pytestmark = pytest.mark.sglang

#: One rank, every expert on two ranks, four experts a rank.
ENGINES = (("qwen3_moe", {}), ("mixtral", {"tp_size": 2}), ("qwen3_moe", {"tp_size": 2, "ep_size": 2}))
#: SGLang gives each rank a memory node of its own unless it is told which processor cores it has.
BOUND = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}


def test_tokens_are_hugging_faces(tmp_path):
    folders = {family: tmp_path / family for family in ("qwen3_moe", "mixtral")}
    expected = {}
    for family, folder in folders.items():
        folder.mkdir()
        expected[family] = make_mixture(folder, family)
    ask = Ask(PROMPTS, {"max_new_tokens": NUM_TOKENS, "ignore_eos": True})
    engines = [
        Engine(str(folders[family]), True, [ask], {"dtype": "float32", **options}, BOUND if options else {})
        for family, options in ENGINES
    ]
    for (family, options), ran in zip(ENGINES, run(engines), strict=True):
        assert [answer.tokens for answer in ran.answers[0]] == expected[family], (family, options)
        assert "atom-plugin serves" in ran.log
