"""All that a client may ask of a server, through the standard client."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import jsonschema
import pytest

from tests.integration.questions import MAX_TOKENS, NUM_ATTEMPTS, OPEN_ENDED, check_streamed_chunks, complete, hang_up

pytestmark = pytest.mark.vllm

COUNTING = "Question: Count up from 21 to 28.\nAnswer:"
SCHEMA = {
    "type": "object",
    "properties": {
        "answer": {"type": "integer", "minimum": 0, "maximum": 99},
        "unit": {"enum": ["books", "coins", "eggs"]},
        "sure": {"type": "boolean"},
    },
    "required": ["answer", "unit", "sure"],
    "additionalProperties": False,
}


@pytest.mark.smoke
def test_completions_answer_and_end_by_themselves(server, client, rows):
    batch = rows[:16]
    completion = client.completions.create(
        model=server.model, prompt=[row.prompt for row in batch], temperature=0, max_tokens=MAX_TOKENS
    )
    assert [choice.text for choice in completion.choices] == [f" {row.answer}\n" for row in batch]
    assert {choice.finish_reason for choice in completion.choices} == {"stop"}
    assert completion.usage.total_tokens == completion.usage.prompt_tokens + completion.usage.completion_tokens


def test_a_completion_ends_at_max_tokens(server, client):
    completion = client.completions.create(model=server.model, prompt=COUNTING, temperature=0, max_tokens=5)
    assert completion.choices[0].finish_reason == "length"
    assert completion.usage.completion_tokens == 5


@pytest.mark.smoke
def test_chat_answers_through_the_chat_template(server, client, rows):
    def ask(row):
        messages = [
            {"role": "system", "content": "Answer with the result only."},
            {"role": "user", "content": row.question},
        ]
        reply = client.chat.completions.create(model=server.model, messages=messages, temperature=0, max_tokens=32)
        return reply.choices[0].message.content.strip() == row.answer

    assert sum(map(ask, rows[:20])) >= 18


@pytest.mark.smoke
def test_streamed_chunks_are_the_text_that_comes_in_one_piece(server, client):
    check_streamed_chunks(client, server, COUNTING)


def test_streamed_chat_is_the_reply_that_comes_in_one_piece(server, client, rows):
    messages = [{"role": "user", "content": rows[0].question}]
    request = {"model": server.model, "messages": messages, "temperature": 0, "max_tokens": MAX_TOKENS}
    whole = client.chat.completions.create(**request).choices[0].message.content
    deltas = [chunk.choices[0].delta.content for chunk in client.chat.completions.create(**request, stream=True)]
    assert "".join(delta or "" for delta in deltas) == whole


@pytest.mark.parametrize(("kept", "text"), [(False, " 21 22 23"), (True, " 21 22 23 24")])
def test_a_stop_string_ends_the_text(server, client, kept, text):
    completion = client.completions.create(
        model=server.model,
        prompt=COUNTING,
        temperature=0,
        max_tokens=MAX_TOKENS,
        stop=["no such text", " 24"],
        extra_body={"include_stop_str_in_output": kept},
    )
    (choice,) = completion.choices
    assert choice.text == text
    assert choice.finish_reason == "stop"
    assert choice.stop_reason == " 24"


def sample(client, server, **options):
    completion = client.completions.create(
        model=server.model, prompt=OPEN_ENDED, temperature=1, max_tokens=24, **options
    )
    return [choice.text for choice in completion.choices]


def test_n_choices_come_back_and_differ(server, client):
    texts = sample(client, server, n=4, seed=7)
    assert len(texts) == 4
    assert len(set(texts)) > 1


def test_the_same_seed_gives_the_same_text(server, client):
    first, again, other = (sample(client, server, seed=seed) for seed in (1, 1, 2))
    assert first == again
    assert first != other


def test_a_json_schema_is_kept_to(server, client, rows):
    for row in rows[:4]:
        reply = client.chat.completions.create(
            model=server.model,
            messages=[{"role": "user", "content": row.question}],
            max_tokens=256,
            temperature=1,
            seed=3,
            response_format={"type": "json_schema", "json_schema": {"name": "reply", "schema": SCHEMA, "strict": True}},
        )
        (choice,) = reply.choices
        assert choice.finish_reason == "stop"
        jsonschema.validate(json.loads(choice.message.content), SCHEMA)


@pytest.mark.smoke
def test_a_choice_and_a_pattern_are_kept_to(server, client, rows):
    def ask(**constraint):
        completion = client.completions.create(
            model=server.model,
            prompt=rows[0].prompt,
            max_tokens=MAX_TOKENS,
            temperature=0,
            extra_body={"structured_outputs": constraint},
        )
        return completion.choices[0].text

    assert ask(choice=["purple", "yellow"]) in ("purple", "yellow")
    assert len(ask(regex="[xyz]{7}").strip("xyz")) == 0


def test_a_client_that_hangs_up_frees_the_server(server, client, rows):
    limit = 2000

    def generated_for_nobody():
        before = server.metric("vllm:generation_tokens_total")
        hang_up(client, server, limit)
        assert complete(client, server, rows[0].prompt).strip() == rows[0].answer
        server.wait_for(lambda: server.metric("vllm:num_requests_running") == 0, "no request running")
        assert server.metric("vllm:num_requests_waiting") == 0
        return server.metric("vllm:generation_tokens_total") - before

    assert any(generated_for_nobody() < limit for _ in range(NUM_ATTEMPTS))


def test_64_requests_at_once_get_the_answers_that_each_gets_alone(server, client, rows):
    batch = rows[100:164]
    alone = [complete(client, server, row.prompt) for row in batch]
    with ThreadPoolExecutor(64) as pool:
        at_once = list(pool.map(lambda row: complete(client, server, row.prompt), batch))
    assert at_once == alone == [f" {row.answer}\n" for row in batch]
