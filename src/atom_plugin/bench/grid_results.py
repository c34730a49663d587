"""What a grid has found: the times of each cell, ratios to the libraries', and geometric means, printed and as JSON."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from atom_plugin.bench.device import Timing
from atom_plugin.bench.grid import Cell, dtype_name

OURS = "atom"


@dataclass(frozen=True)
class CellResult:
    """One cell: of each contender a time, or a note why there is none."""

    cell: Cell
    floor_seconds: float
    memory_bound: bool
    timings: Mapping[str, Timing] = field(default_factory=dict)
    ratios: Mapping[str, float] = field(default_factory=dict)
    """By library: its time divided by ours, the median of samples that were taken directly after each other."""
    notes: Mapping[str, str] = field(default_factory=dict)
    """By contender: why it has no time, or what to know of it."""
    wrong: tuple[str, ...] = ()
    """Contenders whose values disagree."""
    left_out: str | None = None
    """Why nothing was measured."""
    cached: bool = False
    """Whether the copies of the pages fit the GPU's cache, so that a floor of memory says little."""

    @property
    def contenders(self) -> list[str]:
        """Ours first; whoever has a time or a note."""
        return list(dict.fromkeys([OURS, *self.timings, *self.notes]))

    def line(self) -> str:
        """The cell as printed text."""
        head = f"{self.cell.op:<17}{self.cell.name:<74}"
        if self.left_out is not None:
            return f"{head}{self.left_out}"
        columns = "   ".join(self._column(name) for name in self.contenders)
        return f"{head}{columns}{'   fits the cache of the GPU' if self.cached else ''}"

    def _column(self, name: str) -> str:
        if name not in self.timings:
            return f"{name} {'wrong' if name in self.wrong else 'absent'}"
        seconds = self.timings[name].median
        reached = f"{self.cell.num_bytes / seconds / 1e9:5.0f} GB/s {self.floor_seconds / seconds:4.0%}"
        ratio = f" {self.ratios[name]:.2f}x" if name in self.ratios else ""
        return f"{name} {seconds * 1e6:9.2f} us {reached}{ratio}"

    def as_json(self) -> dict[str, Any]:
        """All figures, in the units that the keys name."""
        return {
            **self.cell.as_json(),
            "num_bytes": self.cell.num_bytes,
            "num_operations": self.cell.num_operations,
            "needed_bytes": self.cell.needed_bytes,
            "left_out": self.left_out,
            "floor_microseconds": self.floor_seconds * 1e6,
            "limited_by": "memory" if self.memory_bound else "products",
            "fits_cache": self.cached,
            "contenders": [] if self.left_out is not None else [self._as_json(name) for name in self.contenders],
        }

    def _as_json(self, name: str) -> dict[str, Any]:
        timing = self.timings.get(name)
        return {
            "contender": name,
            "microseconds": None if timing is None else timing.median * 1e6,
            "least_microseconds": None if timing is None else timing.least * 1e6,
            "most_microseconds": None if timing is None else timing.most * 1e6,
            "bytes_a_second": None if timing is None else self.cell.num_bytes / timing.median,
            "share_of_floor": None if timing is None else self.floor_seconds / timing.median,
            "ratio": self.ratios.get(name),
            "wrong": name in self.wrong,
            "note": self.notes.get(name, ""),
        }


@dataclass(frozen=True)
class Mean:
    """The ratios to a library of the cells of one op and cache dtype."""

    library: str
    op: str
    cache_dtype: str
    ratios: Mapping[str, float]
    """By the cell's name."""
    cells: int
    """With those that have no ratio."""

    @property
    def value(self) -> float | None:
        """The geometric mean; None: there is no ratio."""
        if not self.ratios:
            return None
        return math.exp(sum(map(math.log, self.ratios.values())) / len(self.ratios))

    def line(self) -> str:
        """As printed text."""
        what = f"{self.op}, {self.cache_dtype} cache, beside {self.library}:"
        if self.value is None:
            return f"{what} no ratio, in none of {self.cells} cells"
        least, most = (choose(self.ratios, key=self.ratios.__getitem__) for choose in (min, max))
        return (
            f"{what} geometric mean {self.value:.3f}x over {len(self.ratios)} of {self.cells} cells, from "
            f"{self.ratios[least]:.2f}x ({least}) to {self.ratios[most]:.2f}x ({most})"
        )

    def as_json(self) -> dict[str, Any]:
        """All figures."""
        return {
            "library": self.library,
            "op": self.op,
            "cache_dtype": self.cache_dtype,
            "cells": self.cells,
            "cells_with_ratio": len(self.ratios),
            "geometric_mean": self.value,
            "least": min(self.ratios.values(), default=None),
            "most": max(self.ratios.values(), default=None),
        }


def means(results: Sequence[CellResult], libraries: Mapping[str, Sequence[str]]) -> Iterator[Mean]:
    """A mean for each op, cache dtype and library (``libraries`` by op) of the results."""
    for op, cache_dtype in dict.fromkeys((it.cell.op, it.cell.cache_dtype) for it in results):
        cells = [it for it in results if (it.cell.op, it.cell.cache_dtype) == (op, cache_dtype)]
        for library in libraries[op]:
            ratios = {it.cell.name: it.ratios[library] for it in cells if library in it.ratios}
            yield Mean(library, op, dtype_name(cache_dtype), ratios, len(cells))
