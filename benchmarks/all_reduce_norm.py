"""Time an all-reduce with its norm, fused and as two ops, by size: microseconds per call in graphs.

    python -m benchmarks.all_reduce_norm --ranks 2            # on a machine with that many NVIDIA or AMD GPUs

"fused" is our Triton kernel over peer memory, "separate" vLLM's all-reduce (its custom kernel for sizes that it
supports, else NCCL or RCCL) with our norm, and "all-reduce" vLLM's without the norm. "rounds" is the largest difference
between the first two, which round differently, as a share of the values' spread.
"""

from __future__ import annotations

import argparse
import socket
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import multiprocessing

from atom_core.kernels import kernel_set
from atom_core.kernels.all_reduce_norm import ALL_REDUCE_NORM, AllReduceNormSpec
from atom_core.kernels.rms_norm import RMS_NORM, RmsNormKernel, RmsNormSpec
from atom_core.kernels.select import Target
from atom_core.runtime import Communicator

HIDDEN, TOKENS = (2048, 4096, 7168, 8192), (1, 2, 4, 8, 16, 32, 64, 128)
#: Calls in one graph, and how often that is replayed and timed.
CALLS, REPLAYS = 50, 20
EPS = 1e-6


@dataclass(frozen=True)
class Row:
    """One size, as the first rank has measured it."""

    hidden: int
    tokens: int
    fused: float | None
    separate: float
    reduce: float
    rounds: float | None


def join(rank: int, ranks: int, port: int) -> torch.device:
    """Make this process one of vLLM's tensor-parallel group, on a GPU of its own."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel

    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    with set_current_vllm_config(VllmConfig()):
        init_distributed_environment(ranks, rank, f"tcp://127.0.0.1:{port}", rank)
        initialize_model_parallel(ranks)
    return device


def captured(run: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """A graph of ``run``, which has been run before, captured as vLLM does."""
    from vllm.distributed.parallel_state import graph_capture

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with graph_capture(torch.device("cuda", torch.cuda.current_device())) as context:
        run()
        with torch.cuda.graph(graph, stream=context.stream):
            run()
    return graph


def microseconds(run: Callable[[], object]) -> float:
    """Median time of one of many calls in a graph; all ranks call this together."""

    def many() -> None:
        for _ in range(CALLS):
            run()

    graph, times = captured(many), []
    for _ in range(REPLAYS):
        torch.distributed.barrier()
        torch.cuda.synchronize()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(1000 * begin.elapsed_time(end) / CALLS)
    return statistics.median(times)


@dataclass(frozen=True)
class Separate:
    """The two ops, one after the other."""

    group: Communicator
    norm: RmsNormKernel
    weight: torch.Tensor

    def __call__(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """As :class:`atom_core.kernels.all_reduce_norm.AllReduceNormKernel`."""
        return self.norm(self.group.all_reduce(x), self.weight, EPS, residual)


def _serve(rank: int, ranks: int, port: int, results: multiprocessing.Queue[list[Row]]) -> None:
    from vllm.distributed import get_tp_group

    from atom_plugin.vllm.runtime import VllmCommunicator

    device, dtype = join(rank, ranks, port), torch.bfloat16
    group = VllmCommunicator(get_tp_group())
    kernels = kernel_set(Target.of(device), {"all_reduce_norm": "triton", "rms_norm": "triton"}, with_aiter=False)
    rows = []
    for hidden in HIDDEN:
        fused = kernels.select(ALL_REDUCE_NORM, AllReduceNormSpec(hidden, dtype, group))
        norm = kernels.select(RMS_NORM, RmsNormSpec(hidden, dtype))
        assert fused is not None
        for tokens in TOKENS:
            generator = torch.Generator(device).manual_seed(rank)
            x = torch.randn(tokens, hidden, dtype=dtype, device=device, generator=generator)
            common = torch.Generator(device).manual_seed(1000)
            residual = torch.randn(tokens, hidden, dtype=dtype, device=device, generator=common)
            weight = torch.ones(hidden, dtype=dtype, device=device)
            # Added to in place again and again: zeros stay in range.
            zeros, stream = torch.zeros_like(x), residual.clone()
            separate, at_once = Separate(group, norm, weight), partial(fused, weight=weight, eps=EPS)
            takes = fused.takes(x)
            rounds = None
            if takes:
                first = at_once(x, residual.clone())[0].float()
                second = separate(x.clone(), residual.clone())[0].float()
                rounds = ((first - second).abs().max() / (second.max() - second.min())).item()
            rows.append(
                Row(
                    hidden,
                    tokens,
                    microseconds(partial(at_once, zeros, stream)) if takes else None,
                    microseconds(partial(separate, zeros, stream)),
                    microseconds(partial(group.all_reduce, zeros)),
                    rounds,
                )
            )
    if rank == 0:
        results.put(rows)
    torch.distributed.barrier()


def free_port() -> int:
    """One that nobody listens at."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    return port


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, help="how many GPUs (2 to 8)")
    ranks = parser.parse_args().ranks
    if not 2 <= ranks <= min(8, torch.cuda.device_count()):
        parser.error(f"--ranks {ranks}: it takes 2 to 8 GPUs, and {torch.cuda.device_count()} are here.")
    context = multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    running = multiprocessing.spawn(_serve, (ranks, free_port(), results), ranks, join=False)
    while not running.join(timeout=1):  # which raises what a rank has raised
        if not results.empty():
            break
    print("| hidden | tokens | KiB | fused us | separate us | all-reduce us | separate / fused | rounds |")
    print("|---|---|---|---|---|---|---|---|")
    for row in results.get():
        size = row.hidden * row.tokens * 2 / 1024
        times = f"{row.separate:.1f} | {row.reduce:.1f}"
        if row.fused is None:
            print(f"| {row.hidden} | {row.tokens} | {size:.0f} | - | {times} | - | - |")
        else:
            ratio = f"{row.separate / row.fused:.2f} | {row.rounds:.1e}"
            print(f"| {row.hidden} | {row.tokens} | {size:.0f} | {row.fused:.1f} | {times} | {ratio} |")
    while not running.join():
        pass


if __name__ == "__main__":
    main()
