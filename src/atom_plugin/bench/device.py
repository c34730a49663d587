"""Timing of captured graphs on a GPU, and the GPU's limits: memory bandwidth and matrix products.

Uses torch's CUDA interface, which is the same on AMD GPUs. Units are seconds, bytes and operations.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

#: Memory bandwidth by the datasheet, in bytes per second, by torch's name of the GPU.
DATASHEET_BANDWIDTH: Mapping[str, float] = {
    "AMD Instinct MI300X": 5.3e12,
    "AMD Instinct MI325X": 6.0e12,
    "AMD Instinct MI355X": 8.0e12,
    "NVIDIA A100-SXM4-40GB": 1.555e12,
    "NVIDIA A100-SXM4-80GB": 2.039e12,
    "NVIDIA B200": 8.0e12,
    "NVIDIA H100 80GB HBM3": 3.35e12,
    "NVIDIA H200": 4.8e12,
}

#: Seconds of work before a measurement, so that the GPU's clocks are up.
_WARM_SECONDS = 0.5

_MAX_COPIES = 256


@dataclass(frozen=True)
class Timing:
    """Seconds per run, from several samples of many runs each."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, samples: Sequence[float]) -> Timing:
        """The samples' median and spread."""
        return cls(statistics.median(samples), min(samples), max(samples))


@dataclass(frozen=True)
class Ceiling:
    """The memory bandwidth of a GPU in bytes per second, measured in the same process as what is compared with it.

    On some GPUs reading alone is faster than copying, and a decoding step mostly reads.
    """

    device: str
    copy: float
    read: float

    @property
    def bandwidth(self) -> float:
        """The larger of the two."""
        return max(self.copy, self.read)

    @property
    def datasheet(self) -> float | None:
        """Bytes per second by the datasheet, if known."""
        return datasheet_bandwidth(self.device)


class Work(Protocol):
    """What a call must move and compute at least."""

    @property
    def num_bytes(self) -> int:
        """Bytes read and written."""

    @property
    def num_operations(self) -> int:
        """Operations of matrix products."""


@dataclass(frozen=True)
class Limits:
    """The GPU's measured limits: memory bandwidth, and operations per second of matrix products in 16 bits."""

    memory: Ceiling
    products: float

    def least_seconds(self, case: Work, operand_bits: int = 16) -> tuple[float, bool]:
        """A call's minimum time, and whether memory bandwidth bounds it.

        Args:
            case: the call.
            operand_bits: of the numbers that are multiplied, of which 8 take half as long as 16.
        """
        moving = case.num_bytes / self.memory.bandwidth
        computing = case.num_operations * operand_bits / 16 / self.products
        return max(moving, computing), moving >= computing


def datasheet_bandwidth(device_name: str) -> float | None:
    """Bytes per second by :data:`DATASHEET_BANDWIDTH`; a name may have a suffix ("AMD Instinct MI300X OAM")."""
    for name, bandwidth in DATASHEET_BANDWIDTH.items():
        if device_name == name or device_name.startswith(f"{name} "):
            return bandwidth
    return None


def require_gpu() -> torch.device:
    """The GPU to measure on; a ValueError if there is none."""
    if not torch.cuda.is_available():
        raise ValueError(
            f"No GPU that torch {torch.__version__} can use: `atom-plugin bench` measures kernels on one. "
            "On a CPU, benchmarks/vllm_offline.py compares whole engines."
        )
    return torch.device("cuda", torch.cuda.current_device())


def capture(run: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """Capture `run` as a graph, after three warm-up runs on another stream that compile and allocate."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


def warm(run: Callable[[], object], seconds: float = _WARM_SECONDS) -> float:
    """Keep the GPU busy with `run` for some time; returns the seconds per run."""
    count, begin = 0, time.perf_counter()
    while True:
        for _ in range(4):
            run()
        torch.cuda.synchronize()
        count += 4
        passed = time.perf_counter() - begin
        if passed >= seconds:
            return passed / count


def measure(
    run: Callable[[], object],
    repetitions: int,
    sample_seconds: float = 0.02,
    warm_seconds: float = _WARM_SECONDS,
) -> Timing:
    """Seconds per `run` after a warm-up; each of the `repetitions` samples is back-to-back runs between two events."""
    each = max(1, round(sample_seconds / warm(run, warm_seconds)))
    return Timing.of([sample(run, each) for _ in range(repetitions)])


def sample(run: Callable[[], object], count: int) -> float:
    """Seconds per `run` of `count` back-to-back runs between two events."""
    start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    start.record()
    for _ in range(count):
        run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3 / count


def measure_in_turns(
    replays: Mapping[str, Sequence[Callable[[], object]]],
    rounds: int,
    sample_seconds: float = 0.02,
    warm_seconds: float = 0.1,
) -> dict[str, list[float]]:
    """Samples of contenders in turns, in seconds per replay: what the GPU does meanwhile meets all of them.

    Each contender has as many graphs; in each round each graph has one sample, as in :func:`measure`, directly after
    the others' graph of that index. Who goes first alternates. The samples of an index belong together.
    """
    each = {name: max(1, round(sample_seconds / warm(graphs[0], warm_seconds))) for name, graphs in replays.items()}
    names = list(replays)
    samples: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(rounds):
        for index in range(min(map(len, replays.values()), default=0)):
            for name in names if (turn + index) % 2 == 0 else reversed(names):
                samples[name].append(sample(replays[name][index], each[name]))
    return samples


def measure_ceiling(device: torch.device) -> Ceiling:
    """Copy and read a buffer larger than any cache; the best of several samples."""
    free, _ = torch.cuda.mem_get_info(device)
    size = min(1 << 30, free // 4) // 4
    source = torch.ones(size, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    copy = 2 * source.nbytes / measure(lambda: target.copy_(source), 10).least
    read = source.nbytes / measure(source.sum, 10).least
    return Ceiling(torch.cuda.get_device_name(device), copy, read)


def measure_products(device: torch.device, dtype: torch.dtype, size: int = 8192) -> float:
    """Operations per second of torch's product of two large matrices, the best of several samples."""
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(left)
    return 2.0 * size**3 / measure(lambda: torch.mm(left, right, out=out), 10).least


def num_copies(num_bytes: int, cache: int, free: int) -> int:
    """The number of buffer sets of a case: twice the GPU's cache, within its memory.

    Args:
        num_bytes: bytes of one set.
        cache: bytes of the GPU's cache.
        free: bytes of free memory.
    """
    wanted = math.ceil(2 * cache / num_bytes)
    return max(1, min(wanted, _MAX_COPIES, free // 4 // num_bytes))


def cache_and_memory(device: torch.device) -> tuple[int, int]:
    """Bytes of the GPU's last-level cache and of its free memory."""
    cache = int(torch.cuda.get_device_properties(device).L2_cache_size)
    # torch does not report MI300's last-level cache.
    return max(cache, 256 << 20) if torch.version.hip else cache, torch.cuda.mem_get_info(device)[0]
