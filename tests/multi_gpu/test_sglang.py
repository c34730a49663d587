"""SGLang on two GPUs gives the right tokens: by tensor and pipeline parallelism, and with attention of each GPU's own.

The latter have requests and a cache of their own and share the experts: many prompts at once, and one alone, whose step
a rank without requests takes part in. With graphs and without, and with drafts of the checkpoint's own layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from benchmarks import CHECKPOINTS
from tests.integration.deepseek import RIGHT
from tests.integration.questions import greedy_tokens, read_rows
from tests.integration.sglang.offline import Ask, Engine, Ran, drafting, run
from tests.multi_gpu.selected import selected


@dataclass(frozen=True)
class Way:
    """How an engine is started."""

    family: str
    options: Mapping[str, Any]
    drafts: int = 0
    environ: Mapping[str, str] = field(default_factory=dict)

    @property
    def data_parallel_size(self) -> int:
        """Ranks, or groups of them, that have requests of their own."""
        return int(self.options.get("attn_dp_size", 1))

    @property
    def all_options(self) -> Mapping[str, Any]:
        """With those for drafts."""
        return drafting(self.drafts, **self.options) if self.drafts else self.options


TENSOR = {"tp_size": 2}
PIPELINE = {"pp_size": 2}
DATA_PARALLEL = {"tp_size": 2, "attn_dp_size": 2}
EAGER = {"disable_cuda_graph": True}
#: Experts are whole on one rank each, and not in two parts.
WHOLE = {"ep_size": 2}
#: Of both ranks together.
CHUNKS = {"page_size": 64, "chunked_prefill_size": 128}
DECODES = {"cuda_graph_backend_prefill": "disabled"}
#: Slots of states, on each GPU.
STATES = {"max_mamba_cache_size": 256}
NO_COPIES = {"mamba_radix_cache_strategy": "no_buffer", "disable_overlap_schedule": True}
#: Sums over both GPUs with the norm behind them.
ONE_KERNEL = {"ATOM_KERNELS": "all_reduce_norm=triton"}

WAYS: Mapping[str, Way] = {
    "dense, tensor": Way("qwen3", TENSOR),
    "dense, tensor, eager": Way("qwen3", {**TENSOR, **EAGER}),
    "dense, tensor, sums and norms in one kernel": Way("qwen3", TENSOR, environ=ONE_KERNEL),
    "dense, pipeline": Way("qwen3", PIPELINE),
    "mixture, tensor": Way("qwen3_moe", TENSOR),
    "mixture, tensor, whole experts": Way("qwen3_moe", {**TENSOR, **WHOLE}),
    "mixture, data parallel": Way("qwen3_moe", DATA_PARALLEL),
    "mixture, data parallel, eager, whole experts": Way("qwen3_moe", {**DATA_PARALLEL, **EAGER, **WHOLE}),
    "latents, tensor": Way("deepseek_v3", TENSOR),
    "latents, tensor, drafts of 3": Way("deepseek_v3", TENSOR, 3),
    "latents, pipeline": Way("deepseek_v3", PIPELINE),
    "latents, data parallel": Way("deepseek_v3", DATA_PARALLEL),
    "latents, data parallel, whole experts": Way("deepseek_v3", {**DATA_PARALLEL, **WHOLE}),
    "latents, data parallel, graphs of decodes alone": Way("deepseek_v3", {**DATA_PARALLEL, **DECODES}),
    "latents, data parallel, eager": Way("deepseek_v3", {**DATA_PARALLEL, **EAGER}),
    "latents, data parallel, pages of 64, chunks of 64": Way("deepseek_v3", {**DATA_PARALLEL, **CHUNKS}),
    "latents, data parallel, drafts of 1": Way("deepseek_v3", DATA_PARALLEL, 1),
    "latents, data parallel, drafts of 3, whole experts": Way("deepseek_v3", {**DATA_PARALLEL, **WHOLE}, 3),
    "latents, data parallel, drafts of 3, eager": Way("deepseek_v3", {**DATA_PARALLEL, **EAGER}, 3),
    "hybrid, tensor": Way("qwen3_next", {**TENSOR, **STATES}),
    "hybrid, tensor, whole experts, drafts of 3": Way("qwen3_next", {**TENSOR, **WHOLE, **STATES}, 3),
    "hybrid, tensor, no copies of states, eager": Way("qwen3_next", {**TENSOR, **NO_COPIES, **EAGER, **STATES}),
    "hybrid, data parallel": Way("qwen3_next", {**DATA_PARALLEL, **STATES}),
    "hybrid, data parallel, drafts of 1": Way("qwen3_next", {**DATA_PARALLEL, **STATES}, 1),
    "dense hybrid, tensor, drafts of 1, chunks of 128": Way("qwen3_5", {**TENSOR, **CHUNKS, **STATES}, 1),
    "dense hybrid, pipeline": Way("qwen3_5", {**PIPELINE, **STATES}),
}
NUM_PROMPTS = 100
#: That are asked one by one.
NUM_ALONE = 3


@pytest.fixture(scope="module")
def engines(request: pytest.FixtureRequest) -> Mapping[str, Future[Ran]]:
    """Every engine that the tests look at; five at a time, each on both GPUs."""
    if torch.cuda.device_count() < 2:
        pytest.skip("it takes 2 GPUs")
    shared = {"device": "cuda", "sampling_backend": "pytorch", "context_length": 1024, "max_running_requests": 64}
    limits = {"max_total_tokens": 65536, "mem_fraction_static": 0.9}
    prompts = [row.prompt for row in read_rows()[:NUM_PROMPTS]]
    many = Ask(prompts)
    asks = [many, many, *(Ask([prompt]) for prompt in prompts[:NUM_ALONE])]  # the second time from the prefix cache
    pool = ThreadPoolExecutor(5)

    def start(index: int, way: Way) -> Ran:
        options = {**shared, **limits, "port": 12000 + 400 * index, **way.all_options}
        return run([Engine(str(CHECKPOINTS / way.family), True, asks, options, way.environ)], deadline=560.0)[0]

    wanted = selected(request, "name")
    return {name: pool.submit(start, index, WAYS[name]) for index, name in enumerate(WAYS) if name in wanted}


@pytest.mark.parametrize("name", WAYS)
def test_tokens_are_the_right_ones(engines: Mapping[str, Future[Ran]], name: str) -> None:
    ran, way = engines[name].result(), WAYS[name]
    expected = greedy_tokens(way.family, read_rows()[:NUM_PROMPTS])
    many, again, *alone = ([answer.tokens for answer in answers] for answers in ran.answers)
    assert many == expected
    assert again == expected
    assert alone == [[tokens] for tokens in expected[:NUM_ALONE]]
    if way.data_parallel_size > 1:
        assert {answer.meta["dp_rank"] for answer in ran.answers[0]} == set(range(way.data_parallel_size))


@pytest.mark.parametrize("name", [name for name, way in WAYS.items() if way.drafts])
def test_drafts_are_made_and_taken(engines: Mapping[str, Future[Ran]], name: str) -> None:
    ran = engines[name].result()
    assert "atom-plugin drafts for" in ran.log
    answers = [answer for asked in ran.answers for answer in asked]
    right, proposed = (
        sum(answer.meta[f"spec_num_{what}_drafts"] for answer in answers) for what in ("correct", "proposed")
    )
    # Of several drafts in a row the later ones are less often right.
    assert right / proposed >= (RIGHT if WAYS[name].drafts == 1 else RIGHT / 3)
