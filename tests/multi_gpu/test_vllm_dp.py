"""vLLM on two GPUs whose replicas have requests and a cache of their own and share the experts: the right tokens.

Many prompts at once, and one alone, whose step a replica without requests takes part in; with graphs and without, on
both runners, and with drafts of DeepSeek V3's own layer.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import pytest
import torch

from benchmarks import CHECKPOINTS
from tests.integration.deepseek import RIGHT
from tests.integration.questions import MAX_TOKENS, greedy_tokens, read_rows
from tests.integration.server import VllmServer
from tests.integration.vllm.replicas import greedy_at_once


@dataclass(frozen=True)
class Way:
    """How a server is started."""

    family: str
    flags: tuple[str, ...] = ()
    drafts: int = 0
    environ: Mapping[str, str] = field(default_factory=dict)


WHOLE = ("--enable-expert-parallel",)
EAGER = ("--enforce-eager",)
WAYS: Mapping[str, Way] = {
    "graphs": Way("deepseek_v3"),
    "graphs, whole experts": Way("deepseek_v3", WHOLE),
    "graphs on V1": Way("deepseek_v3", environ={"VLLM_USE_V2_MODEL_RUNNER": "0"}),
    "eager": Way("deepseek_v3", EAGER),
    "chunks of 64": Way("deepseek_v3", ("--max-num-batched-tokens", "64")),
    "drafts of 1": Way("deepseek_v3", drafts=1),
    "drafts of 3, whole experts": Way("deepseek_v3", WHOLE, drafts=3),
    "drafts of 3, eager": Way("deepseek_v3", EAGER, drafts=3),
    "a mixture, graphs": Way("qwen3_moe"),
    "a mixture, eager, whole experts": Way("qwen3_moe", (*EAGER, *WHOLE)),
}
NUM_PROMPTS = 100
#: That are asked one by one.
NUM_ALONE = 3


@dataclass(frozen=True)
class Answered:
    """What a server answered: many prompts, the same again, and some alone; and what it has counted by then."""

    many: list[list[int]]
    again: list[list[int]]
    alone: list[list[int]]
    requests: list[float]
    """Of each replica."""
    drafts: tuple[float, float]
    """Right ones, and all."""


def _ask(way: Way) -> Answered:
    flags = [*way.flags, "--model-impl", "atom", "--data-parallel-size", "2", "--max-model-len", "1024"]
    # A stated cache: what is free while others start and end means nothing.
    flags += ["--max-num-seqs", "64", "--gpu-memory-utilization", "0.05", "--kv-cache-memory-bytes", str(2 << 30)]
    if way.drafts:
        flags += ["--speculative-config", json.dumps({"method": "mtp", "num_speculative_tokens": way.drafts})]
    prompts = [row.prompt for row in read_rows()[:NUM_PROMPTS]]
    with VllmServer(CHECKPOINTS / way.family, *flags, environ=way.environ) as server:

        def ask(*prompts: str) -> list[list[int]]:
            return greedy_at_once(server, prompts, MAX_TOKENS, ignore_eos=False)

        many, again = ask(*prompts), ask(*prompts)
        alone = [tokens for prompt in prompts[:NUM_ALONE] for tokens in ask(prompt)]
        requests = [server.metric("vllm:request_success_total", f'engine="{rank}"') for rank in (0, 1)]
        right, proposed = (server.metric(f"vllm:spec_decode_num_{what}_tokens_total") for what in ("accepted", "draft"))
    return Answered(many, again, alone, requests, (right, proposed))


@pytest.fixture(scope="module")
def servers() -> Mapping[str, Future[Answered]]:
    """Every server that the tests look at; five at a time, each on both GPUs."""
    if torch.cuda.device_count() < 2:
        pytest.skip("it takes 2 GPUs")
    pool = ThreadPoolExecutor(5)
    return {name: pool.submit(_ask, way) for name, way in WAYS.items()}


@pytest.mark.parametrize("name", WAYS)
def test_tokens_are_the_right_ones(servers: Mapping[str, Future[Answered]], name: str) -> None:
    answered = servers[name].result()
    expected = greedy_tokens(WAYS[name].family, read_rows()[:NUM_PROMPTS])
    assert answered.many == expected
    assert answered.again == expected
    assert answered.alone == expected[:NUM_ALONE]
    assert min(answered.requests) > 0


@pytest.mark.parametrize("name", [name for name, way in WAYS.items() if way.drafts])
def test_drafts_are_made_and_taken(servers: Mapping[str, Future[Answered]], name: str) -> None:
    right, proposed = servers[name].result().drafts
    # Of several drafts in a row the later ones are less often right.
    assert right / proposed >= (RIGHT if WAYS[name].drafts == 1 else RIGHT / 3)
