"""A server of two data-parallel ranks that split a mixture's experts, and its outputs for prompts that come at once."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from openai import OpenAI

from tests.integration.mixtures import NUM_TOKENS
from tests.integration.questions import connect
from tests.integration.server import VllmServer

#: Of each prompt, so that both ranks have some at the same time, and one of them is done before the other.
COPIES = 3
#: Since vLLM 0.33 each data-parallel rank wants a NUMA node of its own on a CPU, unless this is set, to whatever value.
ENVIRON = {"VLLM_CPU_SIM_MULTI_NUMA": "0"}


@contextmanager
def two_data_parallel_ranks(folder: Path, *flags: str, by_command: bool = False) -> Iterator[VllmServer]:
    """The model in ``folder`` on two; an error in the block if one of them served nothing.

    ``by_command`` is as for any `Server`.
    """
    common = ("--model-impl", "atom", "--dtype", "float32", "--max-model-len", "256", "--data-parallel-size", "2")
    with tempfile.TemporaryDirectory() as counts:
        # Several processes answer requests, and count together where a variable says so when they import Prometheus.
        # vLLM sets it for those that it spawns; forked ones have the import of the process that started them.
        environ = ENVIRON if by_command else {**ENVIRON, "PROMETHEUS_MULTIPROC_DIR": counts}
        with VllmServer(folder, *common, *flags, environ=environ, by_command=by_command) as server:
            yield server
            assert min(served_by_each(server)) > 0


def served_by_each(server: VllmServer, ranks: int = 2) -> list[float]:
    """How many requests each data-parallel rank has answered."""
    return [server.metric("vllm:request_success_total", f'engine="{rank}"') for rank in range(ranks)]


def greedy_at_once(
    server: VllmServer, prompts: Sequence[str], max_tokens: int = NUM_TOKENS, ignore_eos: bool = True
) -> list[list[int]]:
    """Greedy tokens for each prompt, all asked for at the same time."""
    client = connect(server)
    with ThreadPoolExecutor(len(prompts)) as pool:
        return list(pool.map(lambda prompt: _greedy(client, server.model, prompt, max_tokens, ignore_eos), prompts))


def _greedy(client: OpenAI, model: str, prompt: str, max_tokens: int, ignore_eos: bool) -> list[int]:
    others = {"ignore_eos": ignore_eos, "return_token_ids": True}
    answer = client.completions.create(
        model=model, prompt=prompt, max_tokens=max_tokens, temperature=0, extra_body=others
    )
    tokens: list[int] = answer.choices[0].token_ids
    return tokens
