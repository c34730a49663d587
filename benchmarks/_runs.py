"""The runs of GPU benchmarks: shapes of requests, in an engine of this process or of another."""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

#: Caches of compiled code, by the variable that moves each; a fresh folder is a machine that never ran an engine.
_CACHES = {
    "VLLM_CACHE_ROOT": "vllm",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TRITON_CACHE_DIR": "triton",
    "FLASHINFER_WORKSPACE_BASE": "flashinfer",
    "CUDA_CACHE_PATH": "cuda",
}

#: New tokens of a shape's warm-up run.
WARM_TOKENS = 8
#: How long an engine decodes before its first shape: a process that has just started is slower at first.
WARM_SECONDS = 2.0


@dataclass(frozen=True)
class Shape:
    """Requests at once, and the tokens of each prompt or, where one step is timed, those that each has cached."""

    batch: int
    input_len: int

    @classmethod
    def read(cls, text: str) -> Shape:
        """From "8x128"."""
        try:
            batch, input_len = map(int, text.split("x"))
        except ValueError:
            batch = input_len = 0
        if batch < 1 or input_len < 0:
            raise argparse.ArgumentTypeError(f"{text!r} is not of the form 8x128")
        return cls(batch, input_len)

    def __str__(self) -> str:
        return f"{self.batch}x{self.input_len}"


class Generated(NamedTuple):
    """An engine's result of a run."""

    answers: list[list[int]]
    decoding: float | None = None
    """Seconds from the last request's first token to the last token of all, by the engine's clock. This excludes the
    prefill, which varies most. None: the engine does not report it.
    """


#: Runs prompts of token ids to so many new tokens each.
Generate = Callable[[list[list[int]], int], Generated]


class Run(NamedTuple):
    """A run of a shape."""

    seconds: float
    generated: Generated

    def behind_first(self, first: float) -> float:
        """Seconds of all steps after the first token; ``first``: the seconds of a run that ends there."""
        decoding = self.generated.decoding
        return self.seconds - first if decoding is None else decoding


@dataclass(frozen=True)
class Started:
    """An engine that is ready."""

    generate: Generate
    repeatable: Generate
    """The same, with the same answers each time: no random number depends on what ran before."""
    cache_tokens: int
    """The capacity of its cache."""
    stop: Callable[[], object]


def prompts_of(shape: Shape, model: str) -> list[list[int]]:
    """Random token ids, the same each time."""
    vocabulary = json.loads((Path(model) / "config.json").read_text())["vocab_size"]
    generator = random.Random(0)
    return [[generator.randrange(vocabulary) for _ in range(shape.input_len)] for _ in range(shape.batch)]


def timed(generate: Generate, prompts: list[list[int]], tokens: int) -> Run:
    """One run."""
    begin = time.perf_counter()
    generated = generate(prompts, tokens)
    return Run(time.perf_counter() - begin, generated)


def warm_up(engine: Started, prompts: list[list[int]], output_len: int) -> None:
    """Decode for :data:`WARM_SECONDS`."""
    until = time.perf_counter() + WARM_SECONDS
    while time.perf_counter() < until:
        timed(engine.generate, prompts, output_len)


def run_shapes(
    engine: Started, prompts: Mapping[Shape, list[list[int]]], output_len: int, repetitions: int
) -> dict[Shape, dict[str, list[float]]]:
    """Seconds until all requests have their first token, and seconds of each further step, of each repetition.

    Repetitions pass through all shapes, every other one backwards: what changes with time is no shape's alone.
    """
    found: dict[Shape, dict[str, list[float]]] = {shape: {"ttft": [], "tpot": []} for shape in prompts}
    for given in prompts.values():
        timed(engine.generate, given, WARM_TOKENS)
    for repetition in range(repetitions):
        for shape in list(prompts)[:: -1 if repetition % 2 else 1]:
            ttft = timed(engine.generate, prompts[shape], 1).seconds
            whole = timed(engine.generate, prompts[shape], output_len).behind_first(ttft)
            found[shape]["ttft"].append(ttft)
            found[shape]["tpot"].append(whole / (output_len - 1))
    return found


def serve_command(module: str, model: str, name: str) -> list[str]:
    """Of a process that is one engine of the benchmark `module`, with the options of this one."""
    return [sys.executable, "-m", f"benchmarks.{module}", *sys.argv[1:], "--model", model, "--serve", name]


def with_caches(folder: Path) -> dict[str, str]:
    """The environment of an engine whose compile caches are in a folder."""
    return {**os.environ, **{variable: str(folder / kind) for variable, kind in _CACHES.items()}}
