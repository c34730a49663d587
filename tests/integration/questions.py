"""What the tests of both frameworks share: the held-out questions, the checkpoints that know the answers, a client."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from openai import OpenAI
from transformers import AutoTokenizer

from atom_core.kernels.linear.mkldnn import multiplies
from tests.integration.server import Server

TESTS = Path(__file__).parents[1]
FAMILIES = ("qwen3", "llama", "qwen2", "mistral")
# Every answer is shorter: a checkpoint ends it with a newline and the end-of-text token by itself.
MAX_TOKENS = 32
OPEN_ENDED = "Question:"
# Some thousand tokens can be over before a busy server reads of an abort or a hang-up: whoever's model it is, its event
# loop does not look up while tokens wait. So one of so many attempts must be cut short, and one answer of so many come
# in parts: what has not been fetched yet, both frameworks put together with what follows.
NUM_ATTEMPTS = 10
#: An engine's option where products are torch's own: some processors multiply numbers of 16 bits one by one.
BY_VECTORS = {} if multiplies(torch.bfloat16) else {"dtype": "float32"}
#: By family and question, what a trained checkpoint answers wrongly: Hugging Face's model too, in 32 bits and in 16.
MISTAKES = {"gpt_oss": {"Olga has 10 stamps and Jack has 19 stamps. Who has more stamps?": "Olga"}}


@dataclass(frozen=True)
class Row:
    """One held-out question: a prompt with solved examples, and the only right answer."""

    prompt: str
    question: str
    answer: str
    kind: str


def checkpoint(family: str) -> str:
    """The folder of a small trained model."""
    return str(TESTS / "checkpoints" / family)


#: Of the held-out questions those that tests ask at most: the benchmarks of accuracy ask all.
NUM_ROWS = 240


def read_rows() -> list[Row]:
    """All held-out questions."""
    lines = (TESTS / "evaluation" / "heldout.jsonl").read_text(encoding="utf-8").splitlines()
    return [Row(**json.loads(line)) for line in lines]


def right_tokens(family: str, rows: Sequence[Row]) -> list[list[int]]:
    """The tokens of the only right answers and the one that ends each: Hugging Face's greedy ones, in any framework."""
    return _tokens_of(family, [row.answer for row in rows])


def greedy_tokens(family: str, rows: Sequence[Row]) -> list[list[int]]:
    """Hugging Face's greedy tokens, in any framework: :func:`right_tokens`, but for a checkpoint's mistakes."""
    mistakes = MISTAKES.get(family, {})
    return _tokens_of(family, [mistakes.get(row.question, row.answer) for row in rows])


def _tokens_of(family: str, answers: Sequence[str]) -> list[list[int]]:
    tokenizer = AutoTokenizer.from_pretrained(checkpoint(family))
    return [[*tokenizer(f" {answer}\n").input_ids, tokenizer.eos_token_id] for answer in answers]


def connect(server: Server) -> OpenAI:
    """A client that neither waits for ever nor hides a failure by asking again."""
    return OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120)


def check_streamed_chunks(client: OpenAI, server: Server, prompt: str) -> None:
    """Streamed chunks of a greedy answer are the text that comes in one piece, and of some answer more than five."""
    request: dict[str, Any] = {"model": server.model, "prompt": prompt, "temperature": 0, "max_tokens": MAX_TOKENS}
    whole = client.completions.create(**request)

    def num_parts() -> int:
        chunks = list(client.completions.create(**request, stream=True, stream_options={"include_usage": True}))
        texts = [choice for chunk in chunks for choice in chunk.choices]
        assert "".join(choice.text for choice in texts) == whole.choices[0].text
        assert [choice.finish_reason for choice in texts if choice.finish_reason] == ["stop"]
        assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
        return len([choice for choice in texts if choice.text])

    assert any(num_parts() > 5 for _ in range(NUM_ATTEMPTS))


def hang_up(client: OpenAI, server: Server, limit: int, num_streams: int = 4) -> None:
    """Have answers of `limit` tokens streamed at once, and hang up on each after three parts at most."""
    streams = [
        client.completions.create(
            model=server.model, prompt=OPEN_ENDED, max_tokens=limit, extra_body={"ignore_eos": True}, stream=True
        )
        for _ in range(num_streams)
    ]
    for stream in streams:
        assert list(itertools.islice(stream, 3))
        stream.close()


def complete(client: OpenAI, server: Server, prompt: str) -> str:
    """The greedy answer to one prompt."""
    completion = client.completions.create(model=server.model, prompt=prompt, temperature=0, max_tokens=MAX_TOKENS)
    text: str = completion.choices[0].text
    return text
