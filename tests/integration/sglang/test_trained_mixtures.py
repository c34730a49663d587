"""Trained mixtures of experts answer the held-out questions as Hugging Face's models do."""

from __future__ import annotations

import pytest

from tests.integration.questions import checkpoint, greedy_tokens
from tests.integration.sglang.offline import Ask, Engine, run

pytestmark = [pytest.mark.sglang, pytest.mark.slow]

FAMILIES = ("qwen3_moe", "glm4_moe", "gpt_oss")


def test_every_held_out_question_is_answered_as_hugging_face_does(rows):
    asks = [Ask([row.prompt for row in rows])]
    for family, ran in zip(FAMILIES, run([Engine(checkpoint(it), True, asks) for it in FAMILIES]), strict=True):
        assert "SglangRadixAttention" in ran.log
        assert [answer.tokens for answer in ran.answers[0]] == greedy_tokens(family, rows)
