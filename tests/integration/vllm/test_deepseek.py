"""Trained DeepSeek checkpoints answer the held-out questions, with drafts of the layer that one has and without.

Hugging Face's greedy tokens are the right answers; vLLM's own model rotates latents otherwise on a CPU.
"""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.integration.deepseek import RIGHT, TOLERANCE, score
from tests.integration.questions import checkpoint, complete, connect, right_tokens
from tests.integration.server import VllmServer
from tests.integration.vllm.conftest import ANSWER
from tests.integration.vllm.offline import Ask, Engine, run

pytestmark = pytest.mark.vllm

MTP = {"method": "mtp", "num_speculative_tokens": 1}
NUM_DRAFTED, NUM_SERVED = 64, 32


@pytest.mark.slow
@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3"])
def test_every_held_out_question_is_answered_right(rows, family):
    assert score(family)["score"]["exact_match"] == 1.0
    asks = [Ask([row.prompt for row in rows], ANSWER)]
    (ran,) = run([Engine(checkpoint(family), "atom", asks)], deadline=560)
    assert "VllmPagedAttention" in ran.layer_classes
    assert [answer.tokens for answer in ran.answers[0]] == right_tokens(family, rows)


def test_drafts_change_no_token_and_are_as_often_right_as_after_training(rows):
    asked = rows[:NUM_DRAFTED]
    asks = [Ask([row.prompt for row in asked], ANSWER)]
    (ran,) = run([Engine(checkpoint("deepseek_v3"), "atom", asks, {"speculative_config": MTP})])
    assert ran.draft_class == "AtomDeepseekV3Draft"
    assert [answer.tokens for answer in ran.answers[0]] == right_tokens("deepseek_v3", asked)
    drafted, accepted = (ran.counters[f"vllm:spec_decode_num_{what}_tokens"] for what in ("draft", "accepted"))
    assert accepted / drafted >= RIGHT
    assert accepted / drafted == pytest.approx(score("deepseek_v3")["draft"]["acceptance"], abs=TOLERANCE)


@pytest.mark.slow
def test_a_server_drafts_several_tokens_and_tells_how_many_were_right(rows):
    asked = rows[:NUM_SERVED]
    flags = ("--model-impl", "atom", "--speculative-config", json.dumps({**MTP, "num_speculative_tokens": 3}))
    with VllmServer(checkpoint("deepseek_v3"), *flags) as server:
        client = connect(server)
        for concurrency in (16, 1):
            with ThreadPoolExecutor(concurrency) as pool:
                texts = list(pool.map(lambda row: complete(client, server, row.prompt), asked))
            assert texts == [f" {row.answer}\n" for row in asked]
        drafts = server.metric("vllm:spec_decode_num_drafts_total")
        first = server.metric("vllm:spec_decode_num_accepted_tokens_per_pos_total", 'position="0"')
    assert first / drafts >= RIGHT
