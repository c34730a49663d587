"""Which kernels a captured graph runs, how often and for how long: what bounds a step."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

_REPLAYS = 5


@dataclass(frozen=True)
class KernelTime:
    """One kernel's part of a run."""

    name: str
    launches: float
    """A run."""
    seconds: float
    """A run, all launches together. Kernels may overlap, so all kernels' seconds may be more than the run's."""


def profile(graph: torch.cuda.CUDAGraph) -> tuple[KernelTime, ...]:
    """The kernels of a replay of ``graph``, the longest first, as torch's profiler sees them."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    graph.replay()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=activities) as profiler:
        for _ in range(_REPLAYS):
            graph.replay()
        torch.cuda.synchronize()
    # The host's calls are events as well, and have the time of the kernels that they launched.
    on_gpu = (event for event in profiler.events() if event.device_type.name != "CPU")
    return by_name(((event.name, event.self_device_time_total * 1e-6) for event in on_gpu), _REPLAYS)


def by_name(launches: Iterable[tuple[str, float]], runs: int) -> tuple[KernelTime, ...]:
    """Launches, each a name and seconds, of several runs: one entry a kernel, the longest first."""
    found: dict[str, tuple[int, float]] = {}
    for name, seconds in launches:
        count, total = found.get(name, (0, 0.0))
        found[name] = (count + 1, total + seconds)
    times = [KernelTime(name, count / runs, total / runs) for name, (count, total) in found.items()]
    return tuple(sorted(times, key=lambda it: -it.seconds))


def lines(times: Iterable[KernelTime], run_seconds: float) -> list[str]:
    """A table for a person; shares are of the run's time."""
    table = ["  launches  each, us  together, us  share  kernel"]
    for it in times:
        together, share = it.seconds * 1e6, it.seconds / run_seconds
        # Names of C++ templates go on for hundreds of characters.
        table.append(f"  {it.launches:8g}{together / it.launches:10.2f}{together:14.1f}{share:7.1%}  {it.name[:90]}")
    return table
