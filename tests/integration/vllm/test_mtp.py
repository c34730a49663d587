"""Layers of the checkpoint draft in real vLLM, and the tokens are those of decoding one by one."""

from __future__ import annotations

import json

import pytest

from tests.integration.mixtures import CANDIDATES, NUM_TOKENS, PROMPTS, Drafted, make_drafting
from tests.integration.vllm.data_parallel import COPIES, greedy_at_once, two_data_parallel_ranks
from tests.integration.vllm.offline import Ask, Engine, run

pytestmark = pytest.mark.vllm

OPTIONS = {"dtype": "float32", "max_model_len": 256}
EXACTLY = {"max_tokens": NUM_TOKENS, "ignore_eos": True}


def drafting(count: int) -> dict[str, object]:
    return {**OPTIONS, "speculative_config": {"method": "mtp", "num_speculative_tokens": count}}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> tuple[str, Drafted]:
    folder = tmp_path_factory.mktemp("drafting")
    return str(folder), make_drafting(folder)


def tokens(ran, ask=0):
    return [answer.tokens for answer in ran.answers[ask]]


def test_tokens_are_those_of_decoding_one_by_one(checkpoint):
    folder, expected = checkpoint
    together = Ask([*PROMPTS, *CANDIDATES[:13]], EXACTLY)
    one_by_one = [Ask([prompt], EXACTLY) for prompt in PROMPTS]
    plain, drafted = run(
        [
            Engine(folder, "atom", [together], OPTIONS),
            Engine(folder, "atom", [together, *one_by_one], {**drafting(1), "max_num_batched_tokens": 64}),
        ]
    )
    assert (plain.draft_class, drafted.draft_class) == (None, "AtomDeepseekV3Draft")
    assert tokens(drafted) == tokens(plain)
    assert tokens(plain)[: len(PROMPTS)] == expected.answers
    assert [tokens(drafted, ask)[0] for ask in range(1, 4)] == expected.answers


@pytest.mark.parametrize("count", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_tokens_and_right_drafts_are_hugging_faces(checkpoint, count):
    folder, expected = checkpoint
    (ran,) = run([Engine(folder, "atom", [Ask(PROMPTS, EXACTLY)], drafting(count))])
    assert tokens(ran) == expected.answers
    assert ran.counters["vllm:spec_decode_num_accepted_tokens"] == expected.right[count] > 0


@pytest.mark.slow
def test_two_ranks_draft_as_one_does(checkpoint):
    folder, expected = checkpoint
    options = {**drafting(2), "tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    engine = Engine(folder, "atom", [Ask(PROMPTS, EXACTLY)], options)
    (ran,) = run([engine], environ={"VLLM_CPU_OMP_THREADS_BIND": "nobind"})
    assert ran.draft_class == "AtomDeepseekV3Draft"
    assert tokens(ran) == expected.answers
    assert ran.counters["vllm:spec_decode_num_accepted_tokens"] > 0


@pytest.mark.slow
def test_data_parallel_ranks_that_share_the_experts_draft_as_one_does(checkpoint):
    folder, expected = checkpoint
    speculative = json.dumps(drafting(3)["speculative_config"])
    with two_data_parallel_ranks(folder, "--enable-expert-parallel", "--speculative-config", speculative) as server:
        # Alone, the other rank runs along with nothing; together, both draft for several.
        assert greedy_at_once(server, PROMPTS[:1]) == expected.answers[:1]
        assert greedy_at_once(server, PROMPTS * COPIES) == expected.answers * COPIES
        right = server.metric("vllm:spec_decode_num_accepted_tokens_total")
        assert right > COPIES * expected.right[3]
