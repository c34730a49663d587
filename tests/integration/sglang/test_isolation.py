"""Who did not ask for us, or asks for what only SGLang has, gets SGLang's own model."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.integration.checkpoint_damage import damaged
from tests.integration.questions import checkpoint
from tests.integration.sglang.offline import Ask, Engine, run

pytestmark = pytest.mark.sglang

NUM_PROMPTS = 64
# Holds the one function of vLLM's that SGLang's own rope imports on a CPU.
STAND_INS = Path(__file__).with_name("stand_ins")


@pytest.mark.slow
def test_without_the_variable_sglangs_own_model_runs_and_gives_the_same_tokens(rows):
    asks = [Ask([row.prompt for row in rows[:NUM_PROMPTS]])]
    engines = [Engine(checkpoint("qwen3"), ours, asks) for ours in (True, False)]
    path = os.pathsep.join([str(STAND_INS), os.environ.get("PYTHONPATH", "")])
    ours, native = run(engines, environ={"PYTHONPATH": path})
    assert "atom-plugin serves" in ours.log
    assert not any(word in native.log for word in ("atom-plugin serves", "atom-plugin has", "SglangRadixAttention"))
    assert [answer.text for answer in native.answers[0]] == [f" {row.answer}\n" for row in rows[:NUM_PROMPTS]]
    assert [answer.tokens for answer in native.answers[0]] == [answer.tokens for answer in ours.answers[0]]


def test_an_architecture_that_only_sglang_has_runs_there_and_one_line_says_so(tmp_path):
    asks = [Ask(["Question:"], {"max_new_tokens": 4, "ignore_eos": True})]
    options = {"load_format": "dummy", "dtype": "float32"}
    (ran,) = run([Engine(damaged("opt", tmp_path), True, asks, options)])
    assert len(ran.answers[0][0].tokens) == 4
    assert "atom-plugin serves" not in ran.log
    (line,) = [line for line in ran.log.splitlines() if "atom-plugin has" in line]
    assert "atom-plugin has no model for OPTForCausalLM" in line
    assert "SGLang runs its own" in line
