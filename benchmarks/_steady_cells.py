"""The cells of a benchmark under steady load: lengths of prompts and answers, and how requests arrive.

A cell is one pair of lengths under one load: a number of requests at once, or a rate of Poisson arrivals. Each cell has
prompts of its own, because a server with prefix caching would skip the prefill of prompts that it has seen. They are
the same for native and for atom, and in all turns.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

#: New tokens of a warm-up's requests that come at once.
WARM_TOKENS = 32
#: Few requests at once, an odd number.
WARM_FEW = 3
#: Requests at once in a warm-up, where all cells have rates.
WARM_CONCURRENCY = 64
#: Seeds of warm-ups lie behind those of all cells.
WARM_SEED = 10_000


@dataclass(frozen=True)
class Lengths:
    """Tokens of each prompt, and new tokens of each answer."""

    input_len: int
    output_len: int

    @classmethod
    def read(cls, text: str) -> Lengths:
        """From "8k/1k" or "512/128"; "k" is 1024."""
        try:
            found = [int(part[:-1]) * 1024 if part.endswith("k") else int(part) for part in text.split("/")]
            if len(found) == 2 and found[0] >= 1 and found[1] >= 2:
                return cls(*found)
        except ValueError:
            pass
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form 1k/1k or 512/128, with 2 new tokens at least")

    def __str__(self) -> str:
        return f"{_short(self.input_len)}/{_short(self.output_len)}"


@dataclass(frozen=True)
class Cell:
    """One pair of lengths under one load; exactly one of ``concurrency`` and ``rate`` is there."""

    lengths: Lengths
    num_prompts: int
    seed: int
    concurrency: int | None = None
    rate: float | None = None
    """Requests a second."""

    @property
    def load(self) -> str:
        """How requests come, in words."""
        return f"{self.concurrency} at once" if self.rate is None else f"{self.rate:.4g} a second"

    def __str__(self) -> str:
        return f"{self.lengths}, {self.load}"

    def load_flags(self) -> list[str]:
        """Of both frameworks' clients. The rate's arrivals are a Poisson process by default."""
        if self.rate is None:
            return ["--request-rate", "inf", "--max-concurrency", str(self.concurrency)]
        return ["--request-rate", repr(self.rate)]


def read_rate(text: str) -> float | None:
    """Requests a second; None stands for "half"."""
    if text == "half":
        return None
    try:
        rate = float(text)
    except ValueError:
        rate = 0.0
    if not 0 < rate < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is neither half nor a number of requests a second")
    return rate


@dataclass(frozen=True)
class Plan:
    """All that is asked of each server, and with how many prompts."""

    lengths: Sequence[Lengths]
    concurrency: Sequence[int]
    rates: Sequence[float | None]
    """None: half of native's best of the same lengths."""
    prompts_each: int
    least_prompts: int
    seconds: float
    """How long requests arrive at a rate that is a number."""

    def at_once(self, asked: int = 0) -> list[Cell]:
        """The cells with so many requests at once.

        ``asked``: how often the same server has had these cells; its prefix cache has no prompts of the next ones.
        """
        return [
            Cell(lengths, max(self.least_prompts, self.prompts_each * count), self._seed(place, index, asked), count)
            for place, lengths in enumerate(self.lengths)
            for index, count in enumerate(self.concurrency)
        ]

    def at_rates(self, native: Mapping[Cell, float], asked: int = 0) -> list[Cell]:
        """The cells with so many requests a second.

        Args:
            native: its requests a second in each of the cells of :meth:`at_once`.
            asked: as there.
        """
        return [
            self._at_rate(lengths, rate, self._seed(place, len(self.concurrency) + index, asked), native)
            for place, lengths in enumerate(self.lengths)
            for index, rate in enumerate(self.rates)
        ]

    def _at_rate(self, lengths: Lengths, rate: float | None, seed: int, native: Mapping[Cell, float]) -> Cell:
        if rate is not None:
            return Cell(lengths, max(self.least_prompts, round(rate * self.seconds)), seed, rate=rate)
        best = max((cell for cell in native if cell.lengths == lengths), key=lambda cell: native[cell])
        # Half of the prompts at half of the rate: requests arrive for as long as that cell took.
        count = max(self.least_prompts, -(-best.num_prompts // 2))
        return Cell(lengths, count, seed, rate=native[best] / 2)

    def warm_up(self) -> list[Cell]:
        """What each server is asked first.

        For each pair of lengths the most requests at once, with short answers; a few at once, whose steps have numbers
        of tokens that many at once do not have; and one request with its whole answer, which passes through all lengths
        of context.
        """
        most = max(self.concurrency, default=WARM_CONCURRENCY)
        cells = []
        for place, lengths in enumerate(self.lengths):
            short = Lengths(lengths.input_len, min(lengths.output_len, WARM_TOKENS))
            seed = WARM_SEED + 3 * place
            if most > 1:
                cells.append(Cell(short, most, seed, most))
            if most > WARM_FEW:
                cells.append(Cell(short, 3 * WARM_FEW, seed + 1, WARM_FEW))
            if most == 1 or short != lengths:
                cells.append(Cell(lengths, 1, seed + 2, 1))
        return cells

    def _seed(self, place: int, index: int, asked: int = 0) -> int:
        return (asked * len(self.lengths) + place) * (len(self.concurrency) + len(self.rates)) + index


def _short(count: int) -> str:
    return f"{count // 1024}k" if count % 1024 == 0 else str(count)
