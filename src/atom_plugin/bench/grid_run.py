"""Measures a grid: each cell's contenders in turns, in several captured graphs each, after their values were compared.

A graph's calls cycle through copies of the pages that together exceed the GPU's cache. Cells for which the GPU's memory
is too small are left out by name.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from atom_core.kernels.select import Target
from atom_plugin.bench.agreement import TOLERANCE, distance
from atom_plugin.bench.cases import Bench, Run
from atom_plugin.bench.device import (
    Limits,
    Timing,
    cache_and_memory,
    capture,
    measure_ceiling,
    measure_in_turns,
    measure_products,
    num_copies,
    require_gpu,
)
from atom_plugin.bench.grid import GRAPHS, Cell, GridOptions
from atom_plugin.bench.grid_contenders import Inputs, exact, libraries, make_inputs, ours
from atom_plugin.bench.grid_results import OURS, CellResult, means
from atom_plugin.bench.memory import USABLE
from atom_plugin.bench.step import torch_dtype
from atom_plugin.bench.vllm_kernels import Unavailable
from atom_plugin.common.kernels import chosen_kernels
from atom_plugin.common.settings import load_settings

#: Tolerated difference from a library that multiplies in FP8: it rounds queries and weights to 3 bits behind the first.
FP8_TOLERANCE = 2**-3
#: Calls of a graph, and the bytes of a call from which one is enough.
_MIN_CALLS, _LARGE = 16, 1 << 30


@torch.inference_mode()
def measure_grid(options: GridOptions, path: Path | None, say: Callable[[str], None]) -> dict[str, Any]:
    """Measure every cell; ``say`` gets each line as soon as it is measured, and ``path`` all figures after each cell.

    Raises:
        ValueError: no GPU, or an option that is not supported.
    """
    options.check()
    device, dtype = require_gpu(), torch_dtype(options.dtype)
    limits = Limits(measure_ceiling(device), measure_products(device, dtype))
    torch.cuda.empty_cache()
    bench = Bench(device, dtype, chosen_kernels(Target.of(device), load_settings()))
    say(f"{limits.memory.device}, torch {torch.__version__}, vLLM {vllm_version() or 'absent'}, {options.dtype}")
    say(
        f"ceiling, measured here: copying {limits.memory.copy / 1e12:.2f} TB/s, reading "
        f"{limits.memory.read / 1e12:.2f} TB/s, products {limits.products / 1e12:.0f} TFLOP/s"
    )
    say(
        f"graphs for sequences of up to {options.max_model_len} tokens; behind each time the bytes a second and share "
        "of the floor, behind a library's its time divided by ours"
    )
    results: list[CellResult] = []
    said: set[tuple[str, str]] = set()
    for cell in options.cells():
        results.append(measure_cell(cell, bench, limits, options))
        for name, note in results[-1].notes.items():
            if (name, note) not in said:
                said.add((name, note))
                say(f"{name}: {note}")
        say(results[-1].line())
        if path is not None:
            path.write_text(json.dumps(as_json(options, limits, results), indent=1) + "\n")
    for mean in means(results, _libraries(options)):
        say(mean.line())
    return as_json(options, limits, results)


def execute(options: GridOptions, path: Path | None, say: Callable[[str], None]) -> None:
    """Measure, print, and write to ``path``.

    Raises:
        ValueError: as :func:`measure_grid`, or values of some cell disagree; all others are measured and written.
    """
    if wrong := measure_grid(options, path, say)["wrong"]:
        raise ValueError(f"Values disagree, and no time is given, in {len(wrong)} cells: {'; '.join(wrong)}.")


def as_json(options: GridOptions, limits: Limits, results: list[CellResult]) -> dict[str, Any]:
    """All limits, cells and means."""
    return {
        **asdict(limits.memory),
        "torch": torch.__version__,
        "vllm": vllm_version(),
        "dtype": options.dtype,
        "max_model_len": options.max_model_len,
        "graphs": GRAPHS,
        "samples_of_a_graph": options.repetitions,
        "datasheet_bytes_a_second": limits.memory.datasheet,
        "products_a_second": limits.products,
        "cells": [it.as_json() for it in results],
        "left_out": [f"{it.cell.op} {it.cell.name}: {it.left_out}" for it in results if it.left_out is not None],
        "wrong": [f"{it.cell.op} {it.cell.name}: {name} {it.notes[name]}" for it in results for name in it.wrong],
        "geometric_means": [it.as_json() for it in means(results, _libraries(options))],
    }


def vllm_version() -> str | None:
    """The installed vLLM's version; None: there is none."""
    try:
        return metadata.version("vllm")
    except metadata.PackageNotFoundError:
        return None


def _libraries(options: GridOptions) -> dict[str, list[str]]:
    return {cell.op: list(libraries(cell)) for cell in options.cells()}


def measure_cell(cell: Cell, bench: Bench, limits: Limits, options: GridOptions) -> CellResult:
    """Compare the contenders' values, then time those that agree."""
    floor, memory_bound = limits.least_seconds(cell)
    cache, free = cache_and_memory(bench.device)
    if cell.needed_bytes > USABLE * free:
        needs = f"it needs {cell.needed_bytes / 1e9:.1f} GB of GPU memory, and {free / 1e9:.1f} GB are free"
        return CellResult(cell, floor, memory_bound, left_out=f"left out: {needs}")
    copies = num_copies(cell.num_bytes, cache, free - cell.needed_bytes)
    cached = copies * cell.num_bytes < 2 * cache
    try:
        inputs = make_inputs(cell, bench, copies, options.max_model_len)
        return replace(_measured(cell, inputs, floor, memory_bound, options), cached=cached)
    except torch.OutOfMemoryError as error:
        why = f"left out: the GPU's memory was too small, against what was counted: {_first_line(error)}"
        return CellResult(cell, floor, memory_bound, left_out=why)
    finally:
        torch.cuda.empty_cache()


def _measured(cell: Cell, inputs: Inputs, floor: float, memory_bound: bool, options: GridOptions) -> CellResult:
    runs: dict[str, Run] = {}
    notes: dict[str, str] = {}
    wrong: list[str] = []
    answer: torch.Tensor | None = None
    for name, contender in {OURS: ours, **libraries(cell)}.items():
        try:
            run = contender(inputs)
            found = run(0).float()
            if disagreement := _disagreement(name, inputs, found, answer):
                notes[name] = disagreement
                wrong.append(name)
                continue
        except Unavailable as reason:
            notes[name] = str(reason)
            continue
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            notes[name] = f"it fails: {_first_line(error)}"
            if name == OURS:
                wrong.append(name)
            continue
        runs[name] = run
        answer = found.clone() if name == OURS else answer
    times = _times(runs, len(inputs.pools), cell, options.repetitions)
    ratios = {
        name: statistics.median(theirs / mine for theirs, mine in zip(times[name], times[OURS], strict=True))
        for name in times
        if name != OURS and OURS in times
    }
    timings = {name: Timing.of(samples) for name, samples in times.items()}
    return CellResult(cell, floor, memory_bound, timings, ratios, notes, tuple(wrong))


def _disagreement(name: str, inputs: Inputs, found: torch.Tensor, answer: torch.Tensor | None) -> str | None:
    """Why values are wrong: ours beside float32 of the first and last request, a library's beside ours of all.

    Without ours a library's are compared with float32.
    """
    cell = inputs.cell
    tolerance = TOLERANCE[cell.dtype]
    if name != OURS and cell.cache_dtype != cell.dtype:
        tolerance = FP8_TOLERANCE
    if name == OURS or answer is None:
        requests = sorted({0, cell.requests - 1})
        expected, whose = torch.stack([exact(inputs, request) for request in requests]), "float32's"
        found = found[requests]
    else:
        expected, whose = answer, f"{OURS}'s"
    apart = distance(found, expected)
    return None if apart <= tolerance else f"its values are {apart:.1e} from {whose}: no time is given"


def _times(runs: Mapping[str, Run], copies: int, cell: Cell, repetitions: int) -> dict[str, list[float]]:
    """Seconds a call of each contender, in turns."""
    calls = copies if cell.num_bytes >= _LARGE else copies * math.ceil(_MIN_CALLS / copies)

    def all_calls(run: Run) -> Callable[[], None]:
        def call() -> None:
            for index in range(calls):
                run(index % copies)

        return call

    graphs = {name: [capture(all_calls(run)).replay for _ in range(GRAPHS)] for name, run in runs.items()}
    samples = measure_in_turns(graphs, repetitions)
    return {name: [each / calls for each in found] for name, found in samples.items()}


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n")[0]
