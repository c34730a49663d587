"""`--json-model-override-args '{"num_hidden_layers": N}'`: the first layers are served as by SGLang's own model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.integration.isolation import before_all_else
from tests.integration.questions import checkpoint
from tests.integration.sglang.offline import Ask, Engine, run

pytestmark = pytest.mark.sglang

#: Holds the one function of vLLM's that SGLang's own rope imports on a CPU.
STAND_INS = Path(__file__).with_name("stand_ins")
OPTIONS = {"json_model_override_args": json.dumps({"num_hidden_layers": 2}), "dtype": "float32"}


def test_the_layers_beyond_are_left_unread_and_one_line_says_so():
    folder = checkpoint("qwen3")
    asks = [Ask(["Tom has 3 apples."], {"max_new_tokens": 8, "ignore_eos": True}, {"return_logprob": True})]
    made_up = {**OPTIONS, "load_format": "dummy"}
    engines = [Engine(folder, False, asks, OPTIONS), Engine(folder, True, asks, OPTIONS)]
    engines.append(Engine(folder, True, asks, made_up))
    native, ours, dummy = run(engines, environ=before_all_else(STAND_INS))
    assert "atom-plugin serves" in ours.log
    (expected,), (found,) = native.answers[0], ours.answers[0]
    assert found.tokens == expected.tokens
    for own, theirs in zip(*(it.meta["output_token_logprobs"] for it in (found, expected)), strict=True):
        assert own[0] == pytest.approx(theirs[0], abs=1e-3)
    (line,) = [line for line in ours.log.splitlines() if "left unread" in line]
    assert f"num_hidden_layers=2: of {folder}, layers 2 to 4 are left unread" in line
    assert "atom-plugin serves" in dummy.log
    assert len(dummy.answers[0][0].tokens) == 8


def test_a_mixtures_layers_beyond_are_left_unread():
    asks = [Ask(["Tom has 3 apples."], {"max_new_tokens": 4})]
    names = {"gpt_oss": "layers 2 to 3", "deepseek_v3": "layers 2 to 5"}
    for family, ran in zip(names, run([Engine(checkpoint(it), True, asks, OPTIONS) for it in names]), strict=True):
        (line,) = [line for line in ran.log.splitlines() if "left unread" in line]
        assert f"num_hidden_layers=2: of {checkpoint(family)}, {names[family]} are left unread" in line
