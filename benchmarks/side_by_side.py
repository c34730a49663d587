"""Run several commands at once on a host with several GPUs, each with its own GPUs and log.

    python -m benchmarks.side_by_side jobs.txt --output out --seconds 560

A job is a line of `jobs.txt`: how many GPUs it wants, the seconds that it may take, its name, and a shell command that
finds its folder in `$OUT`, with a bar between them:

    1 | 560 | qwen3-8b | python -m benchmarks.vllm_gpu --model qwen3-8b --rounds 1 --json $OUT/qwen3-8b.json
    2 | 120 | sums     | python -m benchmarks.all_reduce_norm --ranks 2

Jobs start in the file's order as soon as GPUs are free; a job that needs more than are free lets later ones pass. Jobs
share the host's processors and disks, so start-up times, and times that depend on the host, are longer.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from tests.integration.processes import end_group, merged_environ, start_group

#: A job is not begun with fewer seconds left.
_FEWEST_SECONDS = 15


@dataclass(frozen=True)
class Job:
    """A line of the file."""

    gpus: int
    seconds: float
    name: str
    command: str

    @classmethod
    def read(cls, line: str) -> Job:
        """From "1 | 60 | name | command".

        Raises:
            ValueError: it is not of that form.
        """
        parts = [part.strip() for part in line.split("|", 3)]
        try:
            gpus, seconds, name, command = int(parts[0]), float(parts[1]), parts[2], parts[3]
        except (IndexError, ValueError):
            raise ValueError(f"{line!r} is not of the form: GPUs | seconds | name | command") from None
        return cls(gpus, seconds, name, command)


def read_jobs(text: str, num_gpus: int) -> list[Job]:
    """The jobs of a file; empty lines, and those that begin with #, are none.

    Raises:
        ValueError: a line is no job, two have one name, or one wants more GPUs than there are.
    """
    jobs = [Job.read(line) for line in text.splitlines() if line.strip() and not line.startswith("#")]
    names = [job.name for job in jobs]
    for job in jobs:
        if names.count(job.name) > 1:
            raise ValueError(f"Two jobs are named {job.name!r}.")
        if not 0 < job.gpus <= num_gpus:
            raise ValueError(f"Job {job.name!r} wants {job.gpus} GPUs; there are {num_gpus}.")
    return jobs


@dataclass
class _Running:
    job: Job
    process: subprocess.Popen[bytes]
    gpus: list[int]
    begun: float

    @property
    def late(self) -> bool:
        return time.monotonic() - self.begun > self.job.seconds


def run(jobs: list[Job], num_gpus: int, seconds: float, output: Path) -> dict[str, int]:
    """Run `jobs`, and give each one's exit code: -1 of one that was stopped, or had no time to begin."""
    output.mkdir(parents=True, exist_ok=True)
    begun, free, codes = time.monotonic(), list(range(num_gpus)), dict.fromkeys((job.name for job in jobs), -1)
    waiting, running = list(jobs), list[_Running]()

    def say(*what: object) -> None:
        print(f"{time.monotonic() - begun:7.1f}", *what, flush=True)

    while waiting or running:
        left = seconds - (time.monotonic() - begun)
        for job in list(waiting):
            if left < _FEWEST_SECONDS or job.gpus > len(free):
                continue
            waiting.remove(job)
            mine, free = free[: job.gpus], free[job.gpus :]
            running.append(_start(job, mine, output))
            say("begun", job.name, "on", mine)
        if left < _FEWEST_SECONDS:
            for job in waiting:
                say("no time for", job.name)
            waiting.clear()
        for it in list(running):
            code = it.process.poll()
            if code is None and not it.late and left > 0:
                continue
            if code is None:
                say("stopping", it.job.name)
            end_group(it.process)  # and what a job that has ended by itself has left behind
            running.remove(it)
            free = sorted(free + it.gpus)
            codes[it.job.name] = -1 if code is None else code
            say("ended", it.job.name, "with", codes[it.job.name], f"after {time.monotonic() - it.begun:.0f} s")
        time.sleep(0.2)
    return codes


def _start(job: Job, gpus: list[int], output: Path) -> _Running:
    mine = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus)), "OUT": str(output.resolve())}
    # Engines of one host would look for ports from the same number on.
    mine["VLLM_PORT"] = str(20000 + 500 * gpus[0])
    with (output / f"{job.name}.log").open("wb") as log:
        process = start_group(["bash", "-c", job.command], merged_environ(mine), log)
    return _Running(job, process, gpus, time.monotonic())


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("jobs", type=Path)
    parser.add_argument("--output", type=Path, default=Path("out"), help="where logs go")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="for all of them")
    parser.add_argument("--gpus", type=int, help="how many there are; left out: as torch counts them")
    given = parser.parse_args()
    num_gpus = given.gpus
    if num_gpus is None:
        import torch

        num_gpus = torch.cuda.device_count()
    try:
        jobs = read_jobs(given.jobs.read_text(), num_gpus)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    return 1 if any(run(jobs, num_gpus, given.seconds, given.output).values()) else 0


if __name__ == "__main__":
    sys.exit(main())
