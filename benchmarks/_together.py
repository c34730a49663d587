"""Native and atom engines side by side on one GPU, with a share of its memory each, alternating run by run.

Changes of the host's and GPU's state affect both alike, and each engine starts once. Start-up times and cache sizes
cannot be compared this way.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from typing import Any

from benchmarks import IMPLEMENTATIONS
from benchmarks._figures import Rounds, summarise
from benchmarks._ran_with import lines_of
from benchmarks._runs import (
    WARM_TOKENS,
    Generated,
    Run,
    Shape,
    Started,
    prompts_of,
    serve_command,
    timed,
    warm_up,
)
from benchmarks._served import Message, Served, answer

#: Runs a shape for so many new tokens in one of the two.
Runs = Callable[[str, Shape, int], Run]
#: The answers of such a run, the same each time.
Answers = Callable[[str, Shape, int], list[list[int]]]


def serve_turns(arguments: argparse.Namespace, start: Callable[[argparse.Namespace], Started]) -> None:
    """Serve as one engine of this process."""
    engine = start(arguments)
    warm_up(engine, prompts_of(arguments.shapes[0], arguments.model), arguments.output_len)

    def run(asked: Message) -> Message:
        prompts = prompts_of(Shape.read(asked["shape"]), arguments.model)
        ran = timed(engine.repeatable if asked["repeatable"] else engine.generate, prompts, asked["tokens"])
        return {"seconds": ran.seconds, **ran.generated._asdict()}

    answer(arguments.replies, {}, run)
    engine.stop()


class Together:
    """Both engines."""

    def __init__(self, module: str, arguments: argparse.Namespace, model: str) -> None:
        self.arguments = arguments
        self.lines = lines_of(module)
        self.answers: dict[str, str] = {}
        self.served: dict[str, Served] = {}
        for name in IMPLEMENTATIONS:
            # One after the other, for an engine that starts measures how fast kernels are, and how much memory is free.
            # Starts are not compared, so both have the caches of compiled code that the machine has.
            self.served[name] = Served(name, serve_command(module, model, name))
            self.served[name].next()

    def run(self) -> Rounds:
        """Every figure of every turn."""
        asked = self.arguments
        self.answers = compare_answers(self._answers, asked.shapes, asked.output_len)
        rounds = take_turns(self._run, asked.shapes, asked.output_len, asked.repetitions)
        self.end()
        return rounds

    def details(self) -> dict[str, Any]:
        """Further content of the JSON file: the agreement of answers by shape, and the kernels that each ran with."""
        return {"answers": self.answers, "ran_with": {name: self._ran_with(name) for name in self.served}}

    def native_kernels(self) -> list[str]:
        """What native's log says of its attention."""
        return self._ran_with("native")["attention"]

    def _ran_with(self, name: str) -> dict[str, list[str]]:
        return self.lines.read(self.served[name].printed())

    def end(self) -> None:
        """Of both."""
        for engine in self.served.values():
            engine.end()
        for engine in self.served.values():
            engine.process.wait()

    def _run(self, name: str, shape: Shape, tokens: int, repeatable: bool = False) -> Run:
        found = self.served[name].ask({"shape": str(shape), "tokens": tokens, "repeatable": repeatable})
        return Run(found.pop("seconds"), Generated(**found))

    def _answers(self, name: str, shape: Shape, tokens: int) -> list[list[int]]:
        return self._run(name, shape, tokens, repeatable=True).generated.answers


def agreement(native: list[list[int]], atom: list[list[int]]) -> str:
    """The common prefixes of both engines' answers, and each engine's number of distinct tokens.

    Very few distinct tokens hint at broken sums. Prefixes count only if the first tokens, those of prefill, agree.
    """
    lengths = [_alike(*pair) for pair in zip(native, atom, strict=True)]
    begun = [length for length in lengths if length]
    behind = f", and of those {statistics.mean(begun) - 1:.1f} of the {len(native[0]) - 1} behind" if begun else ""
    different = [len({token for answer in answers for token in answer}) for answers in (native, atom)]
    return (
        f"{len(begun)} of {len(native)} first tokens alike{behind}; of {sum(map(len, native))} tokens native has "
        f"{different[0]} different ones, atom {different[1]}"
    )


def _alike(one: list[int], other: list[int]) -> int:
    """The length of the common prefix of two answers."""
    return next((at for at, pair in enumerate(zip(one, other, strict=True)) if pair[0] != pair[1]), len(one))


def compare_answers(answers: Answers, shapes: list[Shape], output_len: int) -> dict[str, str]:
    """The agreement of both engines' answers, by shape."""
    said = {}
    for shape in shapes:
        said[str(shape)] = agreement(*(answers(name, shape, output_len) for name in IMPLEMENTATIONS))
        print(f"{shape} answers: {said[str(shape)]}", flush=True)
    return said


def take_turns(run: Runs, shapes: list[Shape], output_len: int, repetitions: int) -> Rounds:
    """Milliseconds of every turn, by figure and implementation, in alternating order.

    Turns pass through all shapes, every other one backwards: what changes with time is no shape's alone.
    """
    names = list(IMPLEMENTATIONS)
    rounds: dict[str, dict[str, list[float]]] = {}
    for shape in shapes:
        rounds |= {f"{shape} {figure}, ms": {name: [] for name in names} for figure in ("tpot", "ttft")}
        for name in names:
            run(name, shape, WARM_TOKENS)
    for repetition in range(repetitions):
        order = names if repetition % 2 == 0 else names[::-1]
        for shape in shapes[:: -1 if repetition % 2 else 1]:
            first = {name: run(name, shape, 1).seconds for name in order}
            whole = {name: run(name, shape, output_len) for name in order}
            tpot, ttft = (rounds[f"{shape} {figure}, ms"] for figure in ("tpot", "ttft"))
            for name in names:
                tpot[name].append(whole[name].behind_first(first[name]) / (output_len - 1) * 1e3)
                ttft[name].append(first[name] * 1e3)
            # Print now, in case something fails later.
            of_shape = summarise({it: rounds[it] for it in (f"{shape} tpot, ms", f"{shape} ttft, ms")})
            rows = (f"{it.figure} {it.native.median:.4g} / {it.atom.median:.4g} x{it.ratio:.3f}" for it in of_shape)
            print("; ".join(rows), flush=True)
    return rounds
