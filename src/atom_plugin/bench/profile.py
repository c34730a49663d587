"""The kernels of a captured graph, with their launches and times."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

_REPLAYS = 5


@dataclass(frozen=True)
class KernelTime:
    """One kernel's launches and time per run."""

    name: str
    launches: float
    seconds: float
    """Of all launches; the sum over kernels, with the pauses between replays, is the run's time."""


@dataclass(frozen=True)
class Launch:
    """One launch on the GPU, in seconds from an arbitrary origin."""

    name: str
    begin: float
    end: float


def profile(graph: torch.cuda.CUDAGraph) -> tuple[KernelTime, ...]:
    """The kernels of a replay of ``graph`` by torch's profiler, longest first."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    graph.replay()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=activities, acc_events=True) as profiler:
        for _ in range(_REPLAYS):
            graph.replay()
        torch.cuda.synchronize()
    # Host calls are events too.
    on_gpu = (event for event in profiler.events() if event.device_type.name != "CPU")
    launches = (Launch(it.name, it.time_range.start * 1e-6, it.time_range.end * 1e-6) for it in on_gpu)
    return by_name(launches, _REPLAYS)


def by_name(launches: Iterable[Launch], runs: int) -> tuple[KernelTime, ...]:
    """Sum the launches of several runs by kernel, longest first.

    A kernel may start, and wait, before the previous one ends; only its time after that end counts.
    """
    found: dict[str, tuple[int, float]] = {}
    done = float("-inf")
    for launch in sorted(launches, key=lambda it: it.end):
        count, total = found.get(launch.name, (0, 0.0))
        found[launch.name] = (count + 1, total + launch.end - max(done, launch.begin))
        done = launch.end
    times = [KernelTime(name, count / runs, total / runs) for name, (count, total) in found.items()]
    return tuple(sorted(times, key=lambda it: -it.seconds))


def lines(times: Iterable[KernelTime], run_seconds: float) -> list[str]:
    """A printed table; shares are of the run's time."""
    table = ["  launches  each, us  together, us  share  kernel"]
    for it in times:
        together, share = it.seconds * 1e6, it.seconds / run_seconds
        # Names of C++ templates have hundreds of characters.
        table.append(f"  {it.launches:8g}{together / it.launches:10.2f}{together:14.1f}{share:7.1%}  {it.name[:90]}")
    return table
