"""Two engines side by side that alternate run by run, so that other load on the machine affects both alike.

A benchmark's `serve` function starts one engine and answers runs over a pipe (`answer_runs`); its `main` is `compare`.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import IMPLEMENTATIONS
from benchmarks._served import Message, Served, answer

#: A decoder of 190M parameters: large enough that products dominate, small enough for two cores.
RANDOM_QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
}


#: Runs prompts of token ids to so many new tokens each.
Generate = Callable[[list[list[int]], int], object]


def answer_runs(arguments: argparse.Namespace, start: Callable[[], Generate]) -> None:
    """Start an engine in this process, then run what it is asked for."""
    memory = ResidentMemory()
    generator = random.Random(0)

    begin = time.perf_counter()
    generate = start()
    ready = {"start": time.perf_counter() - begin}

    def run(asked: Message) -> Message:
        lengths = [arguments.input_len] * asked["batch"]
        prompts = [[generator.randrange(100, 30000) for _ in range(length)] for length in lengths]
        begin = time.perf_counter()
        generate(prompts, asked["tokens"])
        seconds = time.perf_counter() - begin
        memory.look()
        return {"seconds": seconds}

    answer(arguments.replies, ready, run)({"memory": memory.largest})


class Engine:
    """A process that serves one engine; started when made, asleep between runs."""

    def __init__(self, name: str, arguments: argparse.Namespace) -> None:
        command = [sys.executable, "-m", f"benchmarks.{Path(sys.argv[0]).stem}", *sys.argv[1:]]
        command += ["--model", arguments.model, "--serve", name]
        if arguments.model_is_random:
            command += ["--load-format", "dummy"]
        self.served = Served(name, command)
        self.start = float(self.served.next()["start"])

    def run(self, batch: int, tokens: int) -> float:
        """Seconds that ``batch`` prompts and ``tokens`` new tokens for each take."""
        return float(self.served.ask({"batch": batch, "tokens": tokens})["seconds"])

    def stop(self) -> float:
        """End the process; the largest memory, in bytes, that it had."""
        self.served.end()
        memory = float(self.served.next()["memory"])
        self.served.process.wait()
        return memory


class ResidentMemory:
    """The largest proportional memory, in bytes, that this process and its descendants have had together.

    It is looked at between runs: looking takes a process's memory map from it for milliseconds.
    """

    def __init__(self) -> None:
        self.largest = 0

    def look(self) -> None:
        """Take what there is now into account."""
        self.largest = max(self.largest, sum(map(_memory_of, _descendants(os.getpid()))))


def _descendants(root: int) -> list[int]:
    parents: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
        except (FileNotFoundError, ProcessLookupError):
            continue
    family = [root]
    for process in family:
        family.extend(child for child, parent in parents.items() if parent == process)
    return family


def _memory_of(process: int) -> int:
    """Proportional set size: pages shared between processes are counted once in all."""
    try:
        lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))


Figures = dict[str, list[dict[str, float]]]
"""By row of the table: pairs that were measured one right after the other."""


def measure(arguments: argparse.Namespace) -> Figures:
    """All rounds; which engine goes first alternates, between rounds and between runs."""
    figures: Figures = {}
    names = list(IMPLEMENTATIONS)
    for index in range(arguments.rounds + arguments.warm_rounds):
        engines = {name: Engine(name, arguments) for name in (names if index % 2 == 0 else names[::-1])}
        found: Figures = {"start, s": [{name: engine.start for name, engine in engines.items()}]}
        for batch in arguments.batches:
            for engine in engines.values():
                engine.run(batch, 4)
            for repetition in range(arguments.repetitions):
                order = names if repetition % 2 == 0 else names[::-1]
                first = {name: engines[name].run(batch, 1) for name in order}
                whole = {name: engines[name].run(batch, arguments.output_len) for name in order}
                steps = arguments.output_len - 1
                found.setdefault(f"batch {batch}: {arguments.input_len} in, {arguments.output_len} out, s", []).append(
                    whole
                )
                found.setdefault(f"batch {batch}: time to first token of {arguments.input_len}, s", []).append(first)
                found.setdefault(f"batch {batch}: time a token, s", []).append(
                    {name: (whole[name] - first[name]) / steps for name in names}
                )
        found["memory, bytes"] = [{name: engine.stop() for name, engine in engines.items()}]
        print(f"round {index}: " + "; ".join(row["figure"] + f" x{row['ratio']:.2f}" for row in summarise(found)))
        if index >= arguments.warm_rounds:
            for label, pairs in found.items():
                figures.setdefault(label, []).extend(pairs)
    return figures


def summarise(figures: Figures) -> list[dict[str, Any]]:
    """Medians, and the median of the pairs' ratios; above 1, atom is faster, or smaller."""
    table = []
    for label, pairs in figures.items():
        row = {name: statistics.median(pair[name] for pair in pairs) for name in IMPLEMENTATIONS}
        ratios = sorted(pair["native"] / pair["atom"] for pair in pairs)
        table.append(
            {"figure": label, **row, "ratio": statistics.median(ratios), "least": ratios[0], "most": ratios[-1]}
        )
    return table


def compare(description: str | None, serve: Callable[[argparse.Namespace], None]) -> None:
    """The command line: measure both engines, or be one of them."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a local checkpoint; left out: a random Qwen3 of 190M parameters")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--max-model-len", type=int, default=1024)
    parser.add_argument("--enforce-eager", action="store_true")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--input-len", type=int, default=256)
    parser.add_argument("--output-len", type=int, default=33)
    parser.add_argument("--repetitions", type=int, default=7, help="runs of each shape in a round")
    parser.add_argument("--rounds", type=int, default=3, help="engines of each kind")
    parser.add_argument("--warm-rounds", type=int, default=1, help="rounds before, to fill compile caches")
    parser.add_argument("--json", type=Path, help="write all figures there")
    parser.add_argument("--serve", choices=list(IMPLEMENTATIONS), help=argparse.SUPPRESS)
    parser.add_argument("--replies", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve(arguments)
        return
    arguments.model_is_random = arguments.model is None
    with tempfile.TemporaryDirectory() as directory:
        if arguments.model_is_random:
            (Path(directory) / "config.json").write_text(json.dumps(RANDOM_QWEN3))
            arguments.model = directory
        figures = measure(arguments)
    table = summarise(figures)
    width = max(len(row["figure"]) for row in table)
    for row in table:
        print(
            f"{row['figure']:<{width}}  native {row['native']:10.4g}  atom {row['atom']:10.4g}  "
            f"x{row['ratio']:.3f} ({row['least']:.2f} to {row['most']:.2f})"
        )
    if arguments.json:
        arguments.json.write_text(json.dumps({"figures": figures, "table": table}, indent=1))
