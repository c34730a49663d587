"""How a request is cut up, cached and put off must not show in its answer.

Requests go on past the end of their answers here, where the checkpoint is no longer sure of a token: in bfloat16 a
different batch would round differently and pick another one, so the crowded server computes in float32.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.integration.questions import checkpoint, complete, connect
from tests.integration.server import VllmServer
from tests.integration.vllm.offline import Ask, Engine, run

pytestmark = pytest.mark.vllm

CHUNK = 64
NUM_PROMPTS = 24
PAST_THE_END = {"max_tokens": 96, "ignore_eos": True}
LOGPROBS = {"max_tokens": 8, "logprobs": 5, "prompt_logprobs": 5}
NUM_LOGPROB_PROMPTS = 6
# Two float32 models sum in different orders; what was measured is below 1e-4.
LOGPROB_TOLERANCE = 1e-3


@pytest.fixture(scope="module")
def crowded_server():
    """No prefix caching, prompts in chunks of 64 tokens, and a KV cache that holds two or three requests."""
    flags = [
        *("--dtype", "float32", "--max-model-len", "512", "--max-num-seqs", "16"),
        *("--no-enable-prefix-caching", "--max-num-batched-tokens", str(CHUNK)),
        *("--block-size", "32", "--num-gpu-blocks-override", "24"),
    ]
    with VllmServer(checkpoint("qwen3"), "--model-impl", "atom", *flags) as server:
        yield server


@pytest.fixture(scope="module")
def native_float32(rows):
    """What vLLM's own model does with room for everything; not compiled, which takes longer than all that it does."""
    prompts = [row.prompt for row in rows]
    asks = [Ask(prompts[:NUM_PROMPTS], PAST_THE_END), Ask(prompts[:NUM_LOGPROB_PROMPTS], LOGPROBS)]
    (ran,) = run([Engine(checkpoint("qwen3"), "auto", asks, {"dtype": "float32", "enforce_eager": True})])
    return ran


def test_a_prompt_that_was_seen_before_is_taken_from_the_cache(server, client, rows):
    def ask(prompt):
        before = server.metric("vllm:prefix_cache_hits_total")
        text = complete(client, server, prompt)
        return text, server.metric("vllm:prefix_cache_hits_total") - before

    row = max(rows, key=lambda row: len(row.prompt))
    examples = row.prompt.removesuffix(f"{row.question}\nAnswer:")
    text, _ = ask(row.prompt)
    assert text == f" {row.answer}\n"
    again, hits = ask(row.prompt)
    assert again == text
    assert hits >= 256
    other, hits = ask(f"{examples}Count up from 21 to 28.\nAnswer:")
    assert other == " 21 22 23 24 25 26 27 28\n"
    assert hits >= 256


def test_chunks_and_preemptions_do_not_show_in_the_tokens(crowded_server, native_float32, rows):
    client = connect(crowded_server)

    def ask(row):
        completion = client.completions.create(
            model=crowded_server.model,
            prompt=row.prompt,
            temperature=0,
            max_tokens=PAST_THE_END["max_tokens"],
            extra_body={"ignore_eos": True},
        )
        assert completion.usage.prompt_tokens > CHUNK
        return completion.choices[0].text

    batch = rows[:NUM_PROMPTS]
    with ThreadPoolExecutor(NUM_PROMPTS) as pool:
        texts = list(pool.map(ask, batch))
    assert crowded_server.metric("vllm:num_preemptions_total") > 0
    assert texts == [answer.text for answer in native_float32.answers[0]]
    assert crowded_server.metric("vllm:prefix_cache_hits_total") == 0


def test_logprobs_of_chunked_prompts_are_those_of_vllms_own_model(crowded_server, native_float32, rows):
    client = connect(crowded_server)
    for row, expected in zip(rows, native_float32.answers[1], strict=False):
        completion = client.completions.create(
            model=crowded_server.model,
            prompt=row.prompt,
            temperature=0,
            max_tokens=LOGPROBS["max_tokens"],
            logprobs=LOGPROBS["logprobs"],
            extra_body={"prompt_logprobs": LOGPROBS["prompt_logprobs"]},
        )
        (choice,) = completion.choices
        assert choice.text == expected.text
        chosen = [entry[str(token)] for entry, token in zip(expected.logprobs, expected.tokens, strict=True)]
        assert choice.logprobs.token_logprobs == pytest.approx(chosen, abs=LOGPROB_TOLERANCE)
        assert all(len(entry) >= LOGPROBS["logprobs"] for entry in choice.logprobs.top_logprobs)

        assert choice.prompt_logprobs[0] is None
        ours = [{token: found["logprob"] for token, found in entry.items()} for entry in choice.prompt_logprobs[1:]]
        assert ours == [pytest.approx(entry, abs=LOGPROB_TOLERANCE) for entry in expected.prompt_logprobs[1:]]
