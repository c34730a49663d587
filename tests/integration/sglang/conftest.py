"""Hugging Face's answers to the held-out questions, and the server that most tests share."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import pytest
from openai import OpenAI

from tests.flags.sglang_engine import IMPORTED
from tests.integration.preloaded import MODULES, preloaded
from tests.integration.questions import NUM_ROWS, Row, checkpoint, connect, read_rows
from tests.integration.server import SglangServer
from tests.integration.sglang.hugging_face import HuggingFace


@pytest.fixture(scope="session", autouse=True)
def imported() -> Iterator[None]:
    """What takes long to import is imported once: of what SGLang needs, most."""
    with preloaded(MODULES["sglang"], IMPORTED):
        yield


@pytest.fixture(scope="session")
def rows() -> list[Row]:
    """Held-out questions."""
    return read_rows()[:NUM_ROWS]


@pytest.fixture(scope="session")
def hugging_face() -> Callable[[str], HuggingFace]:
    """Hugging Face's own model of a family."""
    return functools.cache(lambda family: HuggingFace(checkpoint(family)))


@pytest.fixture(scope="session")
def server() -> Iterator[SglangServer]:
    """Our model of Qwen3 behind a server that is as it comes, but for JSON: small models fill it with white space.

    It is started as users start one. It also sleeps while it has nothing to do: SGLang would keep a core busy, and
    other engines run beside it.
    """
    flags = ("--enable-metrics", "--constrained-json-disable-any-whitespace", "--sleep-on-idle")
    with SglangServer(checkpoint("qwen3"), *flags, by_command=True) as server:
        yield server


@pytest.fixture(scope="session")
def client(server: SglangServer) -> OpenAI:
    """The standard client of the shared server."""
    return connect(server)
