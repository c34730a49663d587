"""The checkpoints, the held-out prompts, vLLM's own answers to them, and the server that most tests share."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from openai import OpenAI

from tests.integration.server import VllmServer
from tests.integration.vllm.offline import Ask, Engine, Ran, run

TESTS = Path(__file__).parents[2]
FAMILIES = ("qwen3", "llama", "qwen2", "mistral")
# Every answer is shorter: a checkpoint ends it with a newline and the end-of-text token by itself.
MAX_TOKENS = 32
ANSWER = {"max_tokens": MAX_TOKENS}


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


@pytest.fixture(scope="session")
def rows() -> list[Row]:
    """All held-out questions."""
    lines = (TESTS / "evaluation" / "heldout.jsonl").read_text(encoding="utf-8").splitlines()
    return [Row(**json.loads(line)) for line in lines]


@pytest.fixture(scope="session")
def native(rows: list[Row]) -> Callable[[str], Ran]:
    """What vLLM's own model of a family answers to all held-out prompts."""

    @functools.cache
    def native(family: str) -> Ran:
        (ran,) = run([Engine(checkpoint(family), "auto", [Ask([row.prompt for row in rows], ANSWER)])])
        return ran

    return native


@pytest.fixture(scope="session")
def server() -> Iterator[VllmServer]:
    """Our model of Qwen3 behind a server that is as it comes, but for JSON: small models fill it with white space."""
    compact = ("--structured-outputs-config", '{"backend": "xgrammar", "disable_any_whitespace": true}')
    with VllmServer(checkpoint("qwen3"), "--model-impl", "atom", *compact) as server:
        yield server


@pytest.fixture(scope="session")
def client(server: VllmServer) -> OpenAI:
    """The standard client of the shared server."""
    return connect(server)


def connect(server: VllmServer) -> OpenAI:
    """A client that neither waits for ever nor hides a failure by asking again."""
    return OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120)


def complete(client: OpenAI, server: VllmServer, prompt: str) -> str:
    """The greedy answer to one prompt."""
    completion = client.completions.create(model=server.model, prompt=prompt, temperature=0, max_tokens=MAX_TOKENS)
    text: str = completion.choices[0].text
    return text
