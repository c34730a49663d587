"""vLLM's own answers to the held-out questions, and the server that most tests share."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import pytest
from openai import OpenAI

from tests.integration.questions import MAX_TOKENS, Row, checkpoint, connect, read_rows
from tests.integration.server import VllmServer
from tests.integration.vllm.offline import Ask, Engine, Ran, run

ANSWER = {"max_tokens": MAX_TOKENS}


@pytest.fixture(scope="session")
def rows() -> list[Row]:
    """All held-out questions."""
    return read_rows()


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
