"""Several ranks of one model in one process: threads that meet at a barrier for every exchange."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from threading import Barrier, BrokenBarrierError
from typing import Any

import torch

from atom_core.checkpoint import Checkpoint
from atom_core.models.decoder import Carried, DecoderForCausalLM
from atom_core.models.registry import load_model_class
from atom_core.runtime import Communicator, PipelineStage
from atom_core.standalone import Runner, Step, build_runtime, empty_caches, finalize, plan
from atom_core.weights import load_weights

#: Seconds until a rank that waits for one that failed gives up.
_PATIENCE = 60


class OnGpu(torch.Tensor):
    """A tensor that says that it is on a GPU."""

    is_cuda = True


class ThreadRank:
    """One thread's communicator; all of a group share the barrier and the list."""

    def __init__(self, rank: int, barrier: Barrier, shared: list[Any]) -> None:
        self.rank, self.world_size = rank, len(shared)
        self._barrier, self._shared = barrier, shared

    def _exchange(self, x: Any) -> list[Any]:
        self._shared[self.rank] = x
        self._barrier.wait(_PATIENCE)
        everyone = list(self._shared)
        self._barrier.wait(_PATIENCE)
        return everyone

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack(self._exchange(x)).sum(0)

    def all_gather(self, x: torch.Tensor, dim: int = -1) -> torch.Tensor:
        return torch.cat(self._exchange(x), dim)

    def reduce_scatter(self, x: torch.Tensor, dim: int = -1) -> torch.Tensor:
        return self.all_reduce(x).chunk(self.world_size, dim)[self.rank]

    def all_to_all(self, x: torch.Tensor, send: list[int], receive: list[int]) -> torch.Tensor:
        return torch.cat([rows.split(counts)[self.rank] for rows, counts in self._exchange((x, send))])


class ThreadDataParallelRank(ThreadRank):
    """The same of data-parallel ranks, which have rows of their own."""

    count = 0  # this rank's rows

    def gather(self, *rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(torch.cat(self._exchange(each)) for each in rows)

    def reduce(self, x: torch.Tensor) -> torch.Tensor:
        counts = self._exchange(self.count)
        return self.all_reduce(x).split(counts)[self.rank]


def on_ranks(world_size: int, work: Callable[[Communicator], Any]) -> list[Any]:
    """What ``work`` returns on each of ``world_size`` ranks, run side by side."""
    barrier, shared = Barrier(world_size), [None] * world_size

    def run(rank: int) -> Any:
        try:
            return work(ThreadRank(rank, barrier, shared))
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(world_size) as pool:
        ranks = [pool.submit(run, rank) for rank in range(world_size)]
    causes = [error for rank in ranks if (error := rank.exception()) and not isinstance(error, BrokenBarrierError)]
    if causes:
        raise causes[0]
    return [rank.result() for rank in ranks]


def build(runner: Runner, directory: Path, **runtime: Any) -> DecoderForCausalLM:
    """The model of ``runner`` again, loaded, with other ``runtime`` fields."""
    base = build_runtime(torch.device("cpu"), torch.float32, runner.max_model_len, quant=runner.runtime.quant)
    model = load_model_class(runner.config.architecture)(runner.config, replace(base, **runtime))
    load_weights(model, Checkpoint.open(directory).load())
    finalize(model)
    return model


@torch.inference_mode()
def run(
    runner: Runner,
    model: DecoderForCausalLM,
    tokens: list[int],
    carried: Carried | None = None,
) -> torch.Tensor | Carried:
    """One prompt through ``model``."""
    caches = empty_caches(model, runner.runtime, -(-runner.max_model_len // runner.page_size), runner.page_size, 1)
    step = Step(plan(model, runner.batch([0], [len(tokens)])), caches)
    ids = None if carried is not None else torch.tensor(tokens)
    return model(ids, torch.arange(len(tokens)), step, carried=carried)


def tensor_parallel_logits(
    runner: Runner, directory: Path, tokens: list[int], world_size: int, **runtime: Any
) -> list[torch.Tensor]:
    """The logits that each of ``world_size`` ranks ends up with; ``runtime``: other fields of theirs."""

    @torch.inference_mode()
    def work(group: Communicator) -> torch.Tensor:
        model = build(runner, directory, tensor_parallel=group, **runtime)
        hidden = run(runner, model, tokens)
        return model.logits(hidden)

    return on_ranks(world_size, work)


def data_parallel_logits(
    runner: Runner, directory: Path, prompts: list[list[int]], tensor_parallel_size: int, expert_parallel: bool
) -> list[torch.Tensor]:
    """The logits of ``prompts``, one prompt a data-parallel rank; each has so many ranks."""
    count = len(prompts)
    groups = [(Barrier(tensor_parallel_size), [None] * tensor_parallel_size) for _ in range(count)]
    across = [(Barrier(count), [None] * count) for _ in range(tensor_parallel_size)]

    @torch.inference_mode()
    def work(all_ranks: Communicator) -> torch.Tensor:
        dp_rank, rank = divmod(all_ranks.rank, tensor_parallel_size)
        group = ThreadRank(rank, *groups[dp_rank])
        dp = ThreadDataParallelRank(dp_rank, *across[rank])
        dp.count = len(prompts[dp_rank])
        fields = {"tensor_parallel": group, "data_parallel": dp, "expert_parallel": expert_parallel}
        model = build(runner, directory, **fields)
        hidden = run(runner, model, prompts[dp_rank])
        return model.logits(hidden)

    return on_ranks(count * tensor_parallel_size, work)[::tensor_parallel_size]


def stages(num_layers: int, *cuts: int) -> list[PipelineStage]:
    """Pipeline stages that part before each layer of ``cuts``."""
    bounds = [0, *cuts, num_layers]
    return [PipelineStage(first, end) for first, end in pairwise(bounds)]
