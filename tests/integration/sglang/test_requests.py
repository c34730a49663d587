"""All that a client may ask of a server, through the standard client and through SGLang's own endpoint."""

from __future__ import annotations

import itertools
import json
from concurrent.futures import ThreadPoolExecutor

import httpx
import jsonschema
import pytest

from tests.integration.questions import MAX_TOKENS, NUM_ATTEMPTS, OPEN_ENDED, check_streamed_chunks, complete, hang_up

pytestmark = pytest.mark.sglang

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


def post(server, path, **body):
    """The answer to a POST of JSON."""
    answer = httpx.post(f"{server.url}{path}", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    return answer


def generate(server, prompt, sampling=None, **options):
    """What SGLang's own endpoint answers, greedy where nothing else is said."""
    sampling = {"temperature": 0, "max_new_tokens": MAX_TOKENS, **(sampling or {})}
    return post(server, "/generate", text=prompt, sampling_params=sampling, **options).json()


def events(lines):
    """The objects of a stream of server-sent events."""
    for line in lines:
        if line.startswith("data: ") and line != "data: [DONE]":
            yield json.loads(line.removeprefix("data: "))


@pytest.mark.smoke
def test_generate_answers_and_ends_by_itself(server, rows):
    batch = rows[:16]
    outputs = generate(server, [row.prompt for row in batch])
    assert [output["text"] for output in outputs] == [f" {row.answer}\n" for row in batch]
    assert {output["meta_info"]["finish_reason"]["type"] for output in outputs} == {"stop"}
    for output in outputs:
        assert len(output["output_ids"]) == output["meta_info"]["completion_tokens"]


def test_a_prompt_without_a_token_is_refused_and_the_server_goes_on(server, rows):
    for body in ({"text": ""}, {"text": [rows[0].prompt, ""]}, {"text": "", "stream": True}):
        refused = httpx.post(f"{server.url}/generate", json=body, timeout=120)
        assert "The prompt has no token" in refused.text
        # A stream has begun by then.
        assert refused.status_code == (200 if "stream" in body else 400)
    assert generate(server, rows[0].prompt)["text"] == f" {rows[0].answer}\n"


def test_generate_takes_tokens_for_text(server, hugging_face, rows):
    tokens = hugging_face("qwen3").tokenizer(rows[0].prompt).input_ids
    sampling = {"temperature": 0, "max_new_tokens": MAX_TOKENS}
    output = post(server, "/generate", input_ids=tokens, sampling_params=sampling).json()
    assert output["text"] == f" {rows[0].answer}\n"
    assert output["meta_info"]["prompt_tokens"] == len(tokens)


def test_generate_streams_the_text_that_comes_in_one_piece(server):
    whole = generate(server, COUNTING)
    body = {"text": COUNTING, "sampling_params": {"temperature": 0, "max_new_tokens": MAX_TOKENS}, "stream": True}

    def num_parts():
        with httpx.stream("POST", f"{server.url}/generate", json=body, timeout=120) as answer:
            parts = list(events(answer.iter_lines()))
        # Each part holds all of the text until then.
        assert [whole["text"].startswith(part["text"]) for part in parts] == [True] * len(parts)
        assert parts[-1]["text"] == whole["text"]
        return len(parts)

    assert any(num_parts() > 5 for _ in range(NUM_ATTEMPTS))


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
        extra_body={"no_stop_trim": kept},
    )
    (choice,) = completion.choices
    assert choice.text == text
    assert choice.finish_reason == "stop"
    assert choice.matched_stop == " 24"


def test_n_choices_come_back_and_differ(server, client):
    completion = client.completions.create(model=server.model, prompt=OPEN_ENDED, temperature=1, max_tokens=24, n=4)
    texts = [choice.text for choice in completion.choices]
    assert len(texts) == 4
    assert len(set(texts)) > 1


def test_logprobs_of_an_answer_come_with_it(server, client, rows):
    completion = client.completions.create(
        model=server.model, prompt=rows[0].prompt, temperature=0, max_tokens=MAX_TOKENS, logprobs=3
    )
    (choice,) = completion.choices
    found = choice.logprobs
    assert "".join(found.tokens[: len(rows[0].answer) + 1]).startswith(f" {rows[0].answer}"[:2])
    assert len(found.token_logprobs) == len(found.top_logprobs) == completion.usage.completion_tokens
    for logprob, best in zip(found.token_logprobs, found.top_logprobs, strict=True):
        assert logprob == pytest.approx(max(best.values()))
        assert -0.5 < logprob <= 0


def test_a_json_schema_is_kept_to(server, client, rows):
    for row in rows[:4]:
        reply = client.chat.completions.create(
            model=server.model,
            messages=[{"role": "user", "content": row.question}],
            max_tokens=256,
            temperature=1,
            response_format={"type": "json_schema", "json_schema": {"name": "reply", "schema": SCHEMA, "strict": True}},
        )
        (choice,) = reply.choices
        assert choice.finish_reason == "stop"
        jsonschema.validate(json.loads(choice.message.content), SCHEMA)


@pytest.mark.smoke
def test_a_pattern_and_a_schema_are_kept_to_by_generate(server, rows):
    assert generate(server, rows[0].prompt, {"regex": "[xyz]{7}"})["text"].strip("xyz") == ""
    assert generate(server, rows[0].prompt, {"regex": "(purple|yellow)"})["text"] in ("purple", "yellow")
    output = generate(server, rows[0].prompt, {"json_schema": json.dumps(SCHEMA), "max_new_tokens": 256})
    jsonschema.validate(json.loads(output["text"]), SCHEMA)


LONG = 1500


def test_an_aborted_request_says_so_and_is_over(server):
    def end():
        body = {
            "rid": "to-be-aborted",
            "text": OPEN_ENDED,
            "sampling_params": {"max_new_tokens": LONG, "ignore_eos": True},
            "stream": True,
        }
        with httpx.stream("POST", f"{server.url}/generate", json=body, timeout=120) as answer:
            parts = events(answer.iter_lines())
            first = list(itertools.islice(parts, 3))
            post(server, "/abort_request", rid=body["rid"])
            *_, last = (*first, *parts)
        server.wait_for(lambda: server.metric("sglang:num_running_reqs") == 0, "no request running")
        return last["meta_info"]

    ends = (end() for _ in range(NUM_ATTEMPTS))
    aborted = next((meta for meta in ends if meta["finish_reason"]["type"] == "abort"), None)
    assert aborted is not None
    assert aborted["completion_tokens"] < LONG


def test_a_client_that_hangs_up_frees_the_server(server, client, rows):
    def num_aborted():
        before = server.metric("sglang:num_aborted_requests_total")
        hang_up(client, server, LONG)
        assert complete(client, server, rows[0].prompt).strip() == rows[0].answer
        server.wait_for(lambda: server.metric("sglang:num_running_reqs") == 0, "no request running")
        assert server.metric("sglang:num_queue_reqs") == 0
        return server.metric("sglang:num_aborted_requests_total") - before

    assert any(num_aborted() > 0 for _ in range(NUM_ATTEMPTS))


def test_a_prompt_that_was_seen_before_is_taken_from_the_cache_until_it_is_flushed(server, rows):
    row = max(rows, key=lambda row: len(row.prompt))
    examples = row.prompt.removesuffix(f"{row.question}\nAnswer:")

    def ask(prompt):
        output = generate(server, prompt)
        return output["text"], output["meta_info"]["cached_tokens"]

    post(server, "/flush_cache")
    text, cached = ask(row.prompt)
    assert (text, cached) == (f" {row.answer}\n", 0)
    again, cached = ask(row.prompt)
    assert again == text
    assert cached >= 256
    other, cached = ask(f"{examples}Count up from 21 to 28.\nAnswer:")
    assert other == " 21 22 23 24 25 26 27 28\n"
    assert cached >= 256
    post(server, "/flush_cache")
    assert ask(row.prompt) == (text, 0)


def test_32_requests_at_once_get_the_answers_that_each_gets_alone(server, client, rows):
    batch = rows[100:132]
    alone = [complete(client, server, row.prompt) for row in batch]
    with ThreadPoolExecutor(32) as pool:
        at_once = list(pool.map(lambda row: complete(client, server, row.prompt), batch))
    assert at_once == alone == [f" {row.answer}\n" for row in batch]
