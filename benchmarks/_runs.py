"""What benchmarks of engines on a GPU run: shapes of requests, in an engine or in a process that is one."""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

#: Caches of compiled code, by the variable that moves each; a fresh folder is a machine that never ran an engine.
_CACHES = {
    "VLLM_CACHE_ROOT": "vllm",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TRITON_CACHE_DIR": "triton",
    "FLASHINFER_WORKSPACE_BASE": "flashinfer",
    "CUDA_CACHE_PATH": "cuda",
}

#: Tokens of the run of a shape that comes before any that counts.
WARM_TOKENS = 8


@dataclass(frozen=True)
class Shape:
    """Requests at once, and the tokens of each prompt."""

    batch: int
    input_len: int

    @classmethod
    def read(cls, text: str) -> Shape:
        """From "8x128"."""
        try:
            batch, input_len = map(int, text.split("x"))
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not of the form 8x128") from None
        return cls(batch, input_len)

    def __str__(self) -> str:
        return f"{self.batch}x{self.input_len}"


@dataclass(frozen=True)
class Started:
    """An engine that is ready."""

    generate: Callable[[list[list[int]], int], list[list[int]]]
    """Runs prompts of token ids to so many new tokens each: these."""
    cache_tokens: int
    """What its cache holds."""
    stop: Callable[[], object]


def prompts_of(shape: Shape, model: str) -> list[list[int]]:
    """Random token ids, the same each time."""
    vocabulary = json.loads((Path(model) / "config.json").read_text())["vocab_size"]
    generator = random.Random(0)
    return [[generator.randrange(vocabulary) for _ in range(shape.input_len)] for _ in range(shape.batch)]


def timed(engine: Started, prompts: list[list[int]], tokens: int) -> tuple[float, list[list[int]]]:
    """One run: seconds, and the new tokens."""
    begin = time.perf_counter()
    answers = engine.generate(prompts, tokens)
    return time.perf_counter() - begin, answers


def run_shape(engine: Started, prompts: list[list[int]], output_len: int, repetitions: int) -> dict[str, float]:
    """Seconds until all requests have their first token, and seconds of each further step."""
    timed(engine, prompts, WARM_TOKENS)
    first = [timed(engine, prompts, 1)[0] for _ in range(repetitions)]
    whole = [timed(engine, prompts, output_len)[0] for _ in range(repetitions)]
    ttft = statistics.median(first)
    return {"ttft": ttft, "tpot": (statistics.median(whole) - ttft) / (output_len - 1)}


def serve_command(module: str, model: str, name: str) -> list[str]:
    """Of a process that is one engine of the benchmark `module`, with the options of this one."""
    return [sys.executable, "-m", f"benchmarks.{module}", *sys.argv[1:], "--model", model, "--serve", name]


def with_caches(folder: Path) -> dict[str, str]:
    """The environment of an engine whose compile caches are in a folder."""
    return {**os.environ, **{variable: str(folder / kind) for variable, kind in _CACHES.items()}}
