"""vLLM on two GPUs gives the right tokens of mixtures and hybrids: by tensor and pipeline parallelism, and on
data-parallel ranks.

The latter have requests and a cache of their own and share the experts: many prompts at once, and one alone, whose step
a rank without requests takes part in. With graphs and without, on both runners, and with drafts of the checkpoint's own
layer.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import pytest
import torch
from openai import OpenAIError

from benchmarks import CHECKPOINTS
from tests.integration.deepseek import RIGHT
from tests.integration.questions import MAX_TOKENS, greedy_tokens, read_rows
from tests.integration.server import ServerFailed, VllmServer
from tests.integration.vllm.data_parallel import greedy_at_once, served_by_each
from tests.multi_gpu.selected import selected


@dataclass(frozen=True)
class Way:
    """How a server is started."""

    family: str
    flags: tuple[str, ...]
    drafts: int = 0
    environ: Mapping[str, str] = field(default_factory=dict)


TENSOR = ("--tensor-parallel-size", "2")
PIPELINE = ("--pipeline-parallel-size", "2")
DATA_PARALLEL = ("--data-parallel-size", "2")
WHOLE = ("--enable-expert-parallel",)
EAGER = ("--enforce-eager",)
CHUNKS = ("--max-num-batched-tokens", "64")
V1 = {"VLLM_USE_V2_MODEL_RUNNER": "0"}
#: Sums over both GPUs with the norm behind them.
ONE_KERNEL = {"ATOM_KERNELS": "all_reduce_norm=triton"}

WAYS: Mapping[str, Way] = {
    "mixture, tensor": Way("qwen3_moe", TENSOR),
    "mixture, tensor, whole experts": Way("qwen3_moe", (*TENSOR, *WHOLE)),
    "mixture, tensor, sums and norms in one kernel": Way("qwen3_moe", TENSOR, environ=ONE_KERNEL),
    "mixture, data parallel": Way("qwen3_moe", DATA_PARALLEL),
    "mixture, data parallel, eager, whole experts": Way("qwen3_moe", (*DATA_PARALLEL, *EAGER, *WHOLE)),
    "latents, tensor": Way("deepseek_v3", TENSOR),
    "latents, tensor, drafts of 3": Way("deepseek_v3", TENSOR, 3),
    "latents, pipeline": Way("deepseek_v3", PIPELINE),
    "latents, data parallel": Way("deepseek_v3", DATA_PARALLEL),
    "latents, data parallel, whole experts": Way("deepseek_v3", (*DATA_PARALLEL, *WHOLE)),
    "latents, data parallel, on V1": Way("deepseek_v3", DATA_PARALLEL, environ=V1),
    "latents, data parallel, eager": Way("deepseek_v3", (*DATA_PARALLEL, *EAGER)),
    "latents, data parallel, chunks of 64": Way("deepseek_v3", (*DATA_PARALLEL, *CHUNKS)),
    "latents, data parallel, drafts of 1": Way("deepseek_v3", DATA_PARALLEL, 1),
    "latents, data parallel, drafts of 3, whole experts": Way("deepseek_v3", (*DATA_PARALLEL, *WHOLE), 3),
    "latents, data parallel, drafts of 3, eager": Way("deepseek_v3", (*DATA_PARALLEL, *EAGER), 3),
    "hybrid, tensor": Way("qwen3_next", TENSOR),
    "hybrid, tensor, whole experts, drafts of 3": Way("qwen3_next", (*TENSOR, *WHOLE), 3),
    "hybrid, tensor, on V1": Way("qwen3_next", TENSOR, environ=V1),
    "hybrid, data parallel": Way("qwen3_next", DATA_PARALLEL),
    "hybrid, data parallel, drafts of 1": Way("qwen3_next", DATA_PARALLEL, 1),
    "hybrid, data parallel, eager, whole experts": Way("qwen3_next", (*DATA_PARALLEL, *EAGER, *WHOLE)),
    "dense hybrid, tensor, drafts of 1": Way("qwen3_5", TENSOR, 1),
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
    drafts: tuple[float, float]
    """Right ones, and all."""


def _ask(way: Way) -> Answered:
    flags = [*way.flags, "--model-impl", "atom", "--max-model-len", "1024"]
    # A stated cache: what is free while others start and end means nothing.
    flags += ["--max-num-seqs", "64", "--gpu-memory-utilization", "0.05", "--kv-cache-memory-bytes", str(2 << 30)]
    if way.drafts:
        flags += ["--speculative-config", json.dumps({"method": "mtp", "num_speculative_tokens": way.drafts})]
    prompts = [row.prompt for row in read_rows()[:NUM_PROMPTS]]
    with VllmServer(CHECKPOINTS / way.family, *flags, environ=way.environ) as server:

        def ask(*prompts: str) -> list[list[int]]:
            try:
                return greedy_at_once(server, prompts, MAX_TOKENS, ignore_eos=False)
            except OpenAIError as error:
                raise ServerFailed(str(error), server.log, None) from error

        many, again = ask(*prompts), ask(*prompts)
        alone = [tokens for prompt in prompts[:NUM_ALONE] for tokens in ask(prompt)]
        assert min(served_by_each(server, 2 if DATA_PARALLEL[0] in way.flags else 1)) > 0
        right, proposed = (server.metric(f"vllm:spec_decode_num_{what}_tokens_total") for what in ("accepted", "draft"))
    return Answered(many, again, alone, (right, proposed))


@pytest.fixture(scope="module")
def servers(request: pytest.FixtureRequest) -> Mapping[str, Future[Answered]]:
    """Every server that the tests look at; five at a time, each on both GPUs."""
    if torch.cuda.device_count() < 2:
        pytest.skip("it takes 2 GPUs")
    pool = ThreadPoolExecutor(5)
    wanted = selected(request, "name")
    return {name: pool.submit(_ask, way) for name, way in WAYS.items() if name in wanted}


@pytest.mark.parametrize("name", WAYS)
def test_tokens_are_the_right_ones(servers: Mapping[str, Future[Answered]], name: str) -> None:
    answered = servers[name].result()
    expected = greedy_tokens(WAYS[name].family, read_rows()[:NUM_PROMPTS])
    assert answered.many == expected
    assert answered.again == expected
    assert answered.alone == expected[:NUM_ALONE]


@pytest.mark.parametrize("name", [name for name, way in WAYS.items() if way.drafts])
def test_drafts_are_made_and_taken(servers: Mapping[str, Future[Answered]], name: str) -> None:
    right, proposed = servers[name].result().drafts
    # Of several drafts in a row the later ones are less often right.
    assert right / proposed >= (RIGHT if WAYS[name].drafts == 1 else RIGHT / 3)
