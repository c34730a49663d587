"""Layers of the checkpoint draft in real SGLang, and the tokens are those of decoding one by one.

See :mod:`tests.integration.sglang.test_drafts` for what SGLang lacks on a CPU.
"""

from __future__ import annotations

import pytest

from tests.integration.mixtures import CANDIDATES, NUM_TOKENS, PROMPTS, make_drafting
from tests.integration.sglang.offline import Ask, Engine, drafting, run
from tests.integration.sglang.test_drafts import ENVIRON

pytestmark = pytest.mark.sglang

EXACTLY = {"max_new_tokens": NUM_TOKENS, "ignore_eos": True}
OPTIONS = {"dtype": "float32", "disable_cuda_graph": True}


def tokens(answers):
    return [answer.tokens for answer in answers]


def test_tokens_and_right_drafts_are_hugging_faces(tmp_path):
    expected = make_drafting(tmp_path)
    few, many = Ask(PROMPTS, EXACTLY), Ask([*PROMPTS, *CANDIDATES[:13]], EXACTLY)
    one_by_one = [Ask([prompt], EXACTLY) for prompt in PROMPTS]
    plain, one, three = run(
        [
            Engine(str(tmp_path), True, [many], OPTIONS),
            Engine(
                str(tmp_path),
                True,
                [few, many, *one_by_one],
                drafting(1, **OPTIONS, page_size=4, chunked_prefill_size=16),
            ),
            Engine(str(tmp_path), True, [few, many], drafting(3, **OPTIONS)),
        ],
        environ=ENVIRON,
    )
    assert tokens(plain.answers[0])[: len(PROMPTS)] == expected.answers
    for count, ran in ((1, one), (3, three)):
        assert "atom-plugin drafts for" in ran.log
        assert tokens(ran.answers[0]) == expected.answers
        assert tokens(ran.answers[1]) == tokens(plain.answers[0])
        right = sum(answer.meta["spec_num_correct_drafts"] for answer in ran.answers[0])
        assert right == expected.right[count] > 0
    assert [tokens(answers)[0] for answers in one.answers[2:]] == expected.answers
