"""Trained DeepSeek checkpoints answer the held-out questions, with drafts of the layer that one has and without."""

from __future__ import annotations

import pytest

from tests.integration.deepseek import RIGHT, TOLERANCE, score
from tests.integration.questions import checkpoint, right_tokens
from tests.integration.sglang.offline import Ask, Engine, drafting, run
from tests.integration.sglang.test_drafts import ENVIRON

pytestmark = [pytest.mark.sglang, pytest.mark.slow]

FAMILIES = ("deepseek_v2", "deepseek_v3")
#: Drafts are tried on fewer prompts, for SGLang's kernels then run in Triton's interpreter.
NUM_ASKED, NUM_DRAFTED = 100, 64


def test_questions_are_answered_right_also_from_the_prefix_cache(rows):
    asked = rows[:NUM_ASKED]
    ask = Ask([row.prompt for row in asked])
    engines = [Engine(checkpoint(family), True, [ask, ask]) for family in FAMILIES]
    for family, ran in zip(FAMILIES, run(engines), strict=True):
        assert "attention  SglangRadixAttention" in ran.log
        for answers in ran.answers:
            assert [answer.tokens for answer in answers] == right_tokens(family, asked)


def test_drafts_change_no_token_and_are_as_often_right_as_after_training(rows):
    asked = rows[:NUM_DRAFTED]
    asks = [Ask([row.prompt for row in asked])]
    (ran,) = run([Engine(checkpoint("deepseek_v3"), True, asks, drafting(1, dtype="bfloat16"))], environ=ENVIRON)
    assert [answer.tokens for answer in ran.answers[0]] == right_tokens("deepseek_v3", asked)
    right, proposed = (
        sum(answer.meta[f"spec_num_{what}_drafts"] for answer in ran.answers[0]) for what in ("correct", "proposed")
    )
    assert right / proposed >= RIGHT
    assert right / proposed == pytest.approx(score("deepseek_v3")["draft"]["acceptance"], abs=TOLERANCE)
