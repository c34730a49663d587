"""vLLM's own answers to the held-out questions, and the server that most tests share."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from openai import OpenAI

from tests.integration.once import once
from tests.integration.preloaded import MODULES, preloaded
from tests.integration.questions import BY_VECTORS, FAMILIES, MAX_TOKENS, NUM_ROWS, Row, checkpoint, connect, read_rows
from tests.integration.server import VllmServer
from tests.integration.vllm.inspected import inspect_all
from tests.integration.vllm.offline import Ask, Engine, Ran, run

ANSWER = {"max_tokens": MAX_TOKENS}
#: What an engine has of vLLM.
OWN = (
    *("vllm", "vllm.entrypoints.llm", "vllm.v1.engine.core", "vllm.v1.engine.core_client", "vllm.v1.structured_output"),
    *("vllm.v1.executor.uniproc_executor", "vllm.v1.executor.multiproc_executor", "vllm.v1.worker.cpu_worker"),
    "atom_plugin.vllm.models",
)
#: Of the held-out prompts, those at the beginning that are enough where all would take long.
NUM_FEW = 64


@pytest.fixture(scope="session", autouse=True)
def imported() -> Iterator[None]:
    """What takes long to import is imported once: of what vLLM needs, most. Its own classes are looked at once too."""
    inspect_all()
    with preloaded(MODULES["vllm"], OWN):
        yield


@pytest.fixture(scope="session")
def rows() -> list[Row]:
    """Held-out questions."""
    return read_rows()[:NUM_ROWS]


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """A thread a process, on whichever core is free.

    The steps of small models are short: threads that wait for one another take longer than one that does all of it.
    Bound to cores, as they are by default, engines that run side by side all get the same ones. Nothing is compiled by
    torch: vLLM's sampler compiles how it counts log probabilities, in each engine for longer than all else takes.
    """
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        patch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")  # as vLLM sets it, before it imports the compiler
        patch.setenv("TORCHDYNAMO_DISABLE", "1")
        yield


@pytest.fixture(scope="session")
def both(rows: list[Row]) -> Callable[[str], tuple[Ran, Ran]]:
    """What vLLM's own model of a family and ours answer to the held-out prompts; ours to the first ones twice.

    vLLM's own answers all of them as the first family alone: the right answers to all are known, and its are right. It
    is not compiled: that takes longer than all of its answers, of which it changes none.
    """
    prompts = [row.prompt for row in rows]

    @once
    def both(family: str) -> tuple[Ran, Ran]:
        model = checkpoint(family)
        everything, few = Ask(prompts, ANSWER), Ask(prompts[:NUM_FEW], ANSWER)
        asked = everything if family == FAMILIES[0] else few
        native = Engine(model, "auto", [asked], {"enforce_eager": True, **BY_VECTORS})
        # Room for all prompts: the first ones are still in the cache when they are asked again.
        expected, ours = run([native, Engine(model, "atom", [everything, few], {"kv_cache_memory_bytes": 2**30})])
        return expected, ours

    return both


@pytest.fixture(scope="session")
def native(both: Callable[[str], tuple[Ran, Ran]]) -> Callable[[str], Ran]:
    """What vLLM's own model of a family answers to the held-out prompts, or to the first ones."""
    return lambda family: both(family)[0]


@pytest.fixture(scope="session")
def server() -> Iterator[VllmServer]:
    """Our model of Qwen3 behind a server that is as it comes, but for JSON: small models fill it with white space.

    It is started as users start one.
    """
    compact = ("--structured-outputs-config", '{"backend": "xgrammar", "disable_any_whitespace": true}')
    with VllmServer(checkpoint("qwen3"), "--model-impl", "atom", *compact, by_command=True) as server:
        yield server


@pytest.fixture(scope="session")
def client(server: VllmServer) -> OpenAI:
    """The standard client of the shared server."""
    return connect(server)
