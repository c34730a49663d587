"""How a request is cut up, cached and put off must not show in its answer.

Requests go on past the end of their answers here, where the checkpoint is no longer sure of a token: in bfloat16 a
different batch would round differently and pick another one, so these engines compute in float32.
"""

from __future__ import annotations

import pytest

from tests.integration.questions import checkpoint
from tests.integration.sglang.offline import Ask, Engine, run

pytestmark = [pytest.mark.sglang, pytest.mark.slow]

NUM_PROMPTS = 16
NUM_LOGPROB_PROMPTS = 6
NUM_TOP = 5
LENGTH = 96
# With `ignore_eos` SGLang knows how much a request will need, and puts none off.
PAST_THE_END = {"max_new_tokens": LENGTH, "min_new_tokens": LENGTH}
LOGPROBS = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": NUM_TOP}
# Two float32 models sum in different orders: of the distance between the largest and the smallest logit.
TOLERANCE = 1e-4
# Holds three requests or four, and is filled without a thought for what they will still need.
SMALL_POOL = {
    "dtype": "float32",
    "max_total_tokens": 1024,
    "chunked_prefill_size": 64,
    "schedule_conservativeness": 0.01,
}


@pytest.fixture(scope="module")
def ran(rows):
    """An engine with room for a few requests only, that is asked for long answers and then for log-probabilities."""
    prompts = [row.prompt for row in rows]
    asks = [
        Ask(prompts[:NUM_PROMPTS], PAST_THE_END),
        Ask(prompts[NUM_PROMPTS : NUM_PROMPTS + NUM_LOGPROB_PROMPTS], {"max_new_tokens": 8}, LOGPROBS),
    ]
    (ran,) = run([Engine(checkpoint("qwen3"), True, asks, SMALL_POOL)])
    return ran


def test_requests_that_were_put_off_go_on_with_the_same_tokens(ran, hugging_face, rows):
    answers, _ = ran.answers
    assert sum(answer.meta["num_retractions"] for answer in answers) > 0
    assert "#retracted_reqs" in ran.log
    reference = hugging_face("qwen3")
    for answer, row in zip(answers, rows, strict=False):
        assert len(answer.tokens) == LENGTH
        assert answer.tokens == reference.greedy_along(row.prompt, answer.tokens, past_the_end=True)


def test_logprobs_of_prompts_and_answers_are_hugging_faces(ran, hugging_face, rows):
    reference = hugging_face("qwen3")
    for answer, row in zip(ran.answers[1], rows[NUM_PROMPTS:], strict=False):
        prompt = reference.tokenizer(row.prompt).input_ids
        scores = reference.scores([*prompt, *answer.tokens])
        given = [*answer.meta["input_token_logprobs"], *answer.meta["output_token_logprobs"]]
        best = [*answer.meta["input_top_logprobs"], *answer.meta["output_top_logprobs"]]
        assert [token for _, token, _ in given] == [*prompt, *answer.tokens]
        assert given[0][0] is None
        tolerance = TOLERANCE * scores.spread
        for expected, (logprob, token, _), top in zip(scores.logprobs, given[1:], best[1:], strict=False):
            assert logprob == pytest.approx(expected[token].item(), abs=tolerance)
            assert len(top) == NUM_TOP
            assert [value for value, _, _ in top] == pytest.approx(
                expected.topk(NUM_TOP).values.tolist(), abs=tolerance
            )
            assert [expected[token].item() for _, token, _ in top] == pytest.approx(
                [value for value, _, _ in top], abs=tolerance
            )
