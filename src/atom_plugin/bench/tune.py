"""Find the fastest tile of each product of few rows on this GPU, and write it where the kernel looks for it.

Each candidate is first timed roughly by itself. The best few are then timed, in turns with the default, within a
decoding step of the model with fewer layers: launches overlap there, so the fastest by itself is often not the fastest
in a step. A gain of less than :data:`WORTH` of the step is noise, and the default stays. Nothing is tuned while
serving; see :mod:`atom_core.kernels.tuned`.
"""

from __future__ import annotations

import json
import math
import os
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.nn.functional as F

import atom_core.kernels.linear
from atom_core.kernels import tuned
from atom_core.kernels.linear.tiles import TORCH, Tile, on_hopper, tile_for, tried
from atom_core.kernels.select import Target
from atom_core.kernels.triton_support import overlaps, why_no_triton
from atom_core.models.read_config import read_model_config
from atom_core.standalone import build_runtime, random_model
from atom_plugin.bench.batches import MAX_MODEL_LEN
from atom_plugin.bench.cases import products, routers
from atom_plugin.bench.device import capture, measure, require_gpu
from atom_plugin.bench.models import cut, read_config
from atom_plugin.bench.routing import send_to_given_experts
from atom_plugin.bench.step import decoding
from atom_plugin.bench.tiles import SHARED_MEMORY, candidates
from atom_plugin.common.kernels import forced_kernels
from atom_plugin.common.settings import load_settings

OP_FOLDER = Path(atom_core.kernels.linear.__file__).parent

#: Numbers of input rows to tune for.
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
#: The share of the step's time that a tile must gain.
WORTH = 0.003
#: The model's number of layers, and the cached tokens of each request.
_LAYERS, _CONTEXT = 12, 192
#: Candidates that are timed in the step, and the turns of each.
_FINAL, _TURNS = 5, 5

#: An entry of the file.
Entry = Mapping[str, Any]
T = TypeVar("T")


def tune_linear(
    models: Sequence[str], dtype: torch.dtype, rows: Sequence[int], output: Path | None, say: Callable[[str], None]
) -> Path:
    """Time the candidates for every product of `models` and write the best; the file's other entries stay.

    Args:
        models: names, folders or files; see :mod:`atom_plugin.bench.models`.
        dtype: of weights and inputs.
        rows: some of :data:`ROWS`.
        output: the folder to write to; None: next to the kernel.
        say: gets a line per shape.

    Returns:
        The file.

    Raises:
        ValueError: no GPU, no Triton, or a damaged file.
    """
    device = require_gpu()
    if reason := why_no_triton(Target.of(device)):
        raise ValueError(f"--tune: {reason}")
    name = torch.cuda.get_device_name(device)
    path = tuned.tuned_file(OP_FOLDER, name) if output is None else output / tuned.tuned_file(OP_FOLDER, name).name
    entries: dict[tuple[Any, ...], Entry]
    entries = {_key(entry): entry for entry in (tuned.read_entries(path) if path.exists() else ())}
    for model in models:
        for entry in _tune_model(model, dtype, rows, device, say):
            entries[_key(entry)] = entry
            # After each entry, so that an interrupted run keeps them.
            write(path, name, list(entries.values()))
    return path


@torch.inference_mode()
def _tune_model(
    name: str, dtype: torch.dtype, rows_of_inputs: Sequence[int], device: torch.device, say: Callable[[str], None]
) -> Iterator[Entry]:
    """An entry for each product and number of rows."""
    hf = read_config(name)
    config = read_model_config(cut(hf, min(_LAYERS, read_model_config(hf).num_layers)))
    runtime = build_runtime(device, dtype, MAX_MODEL_LEN, forced_kernels(load_settings()), cache_dtype=dtype)
    model = random_model(config, runtime)
    send_to_given_experts(model, config, max(rows_of_inputs))
    sizes = dict.fromkeys((it.out_features, it.in_features) for it in [*routers(config), *products(config)])
    for rows in rows_of_inputs:
        run = decoding(model, config, runtime, rows, _CONTEXT)
        chosen: dict[tuned.Shape, Tile | None] = {}
        for out_features, in_features in sizes:
            shape = tuned.Shape(rows, out_features, in_features, str(dtype).removeprefix("torch."))
            default = default_tile(rows, out_features, in_features, dtype.itemsize, device)
            few = fastest_isolated(rows, out_features, in_features, dtype, device)
            seconds = _in_step(run, shape, dict.fromkeys([default, *few]), chosen)
            best = choose(default, seconds)
            chosen[shape] = best
            entry: dict[str, Any] = {
                **shape._asdict(),
                "tile": TORCH if best is None else asdict(best),
                "microseconds": round(seconds[best] * 1e6, 2),
                "default_microseconds": round(seconds[default] * 1e6, 2),
            }
            say(line(entry))
            yield entry


def _in_step(
    run: Callable[[], None],
    shape: tuned.Shape,
    tiles: Iterable[Tile | None],
    chosen: Mapping[tuned.Shape, Tile | None],
) -> dict[Tile | None, float]:
    """Seconds of the step with each tile, measured in turns; None is torch's product."""

    def with_tile(tile: Tile | None, run: Callable[[], T]) -> T | None:
        with tried({**chosen, shape: tile}):
            # Fused with its neighbours, the product may need more than the GPU has.
            return _or_none(run)

    tiles = list(tiles)
    with ThreadPoolExecutor(len(tiles)) as pool:
        # Only to compile them: they write to the same buffers at once.
        list(pool.map(torch.inference_mode()(partial(with_tile, run=run)), tiles))
    captured = {tile: with_tile(tile, partial(capture, run)) for tile in tiles}
    graphs = {tile: graph for tile, graph in captured.items() if graph is not None}
    seconds: dict[Tile | None, list[float]] = {tile: [] for tile in graphs}
    for _ in range(_TURNS):
        for tile, graph in graphs.items():
            seconds[tile].append(measure(graph.replay, 1, sample_seconds=0.02, warm_seconds=0.005).median)
    return {tile: statistics.median(found) for tile, found in seconds.items()}


def fastest_isolated(
    rows: int, out_features: int, in_features: int, dtype: torch.dtype, device: torch.device
) -> list[Tile]:
    """The fastest candidates in consecutive calls over weights larger than the GPU's cache."""
    properties = torch.cuda.get_device_properties(device)
    shared_memory = int(getattr(properties, "shared_memory_per_block_optin", SHARED_MEMORY))
    tiles = candidates(rows, out_features, in_features, shared_memory, dtype.itemsize, on_hopper(device))
    if not tiles:
        return []
    weight_bytes = out_features * in_features * dtype.itemsize
    copies = max(1, min(64, math.ceil(2 * properties.L2_cache_size / weight_bytes)))
    x = torch.randn(rows, in_features, device=device).to(dtype)
    weights = [
        torch.empty(out_features, in_features, dtype=dtype, device=device).normal_(0.0, in_features**-0.5)
        for _ in range(copies)
    ]
    expected = F.linear(x, weights[0]).float()

    @torch.inference_mode()
    def attempt(tile: Tile) -> torch.Tensor | None:
        return _or_none(lambda: run_with_tile(x, weights[0], tile))

    # In parallel, because compilation takes most of the time.
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        found = pool.map(attempt, tiles)
        right = [tile for tile, y in zip(tiles, found, strict=True) if y is not None and _is_close(y, expected)]
    calls = copies * math.ceil(16 / copies)

    def seconds(tile: Tile) -> float:
        def all_calls() -> None:
            for index in range(calls):
                run_with_tile(x, weights[index % copies], tile)

        return measure(capture(all_calls).replay, 3, sample_seconds=0.002, warm_seconds=0.005).median

    return sorted(right, key=seconds)[:_FINAL]


def _is_close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return float((found.float() - expected).abs().max() / expected.abs().max()) <= 0.02


def _or_none(run: Callable[[], T]) -> T | None:
    """The result of `run`; None if Triton cannot compile a tile or it needs more than the GPU has."""
    try:
        return run()
    except Exception as error:
        if type(error).__module__.partition(".")[0] == "triton":
            return None
        raise


def line(entry: Entry) -> str:
    """An entry as printed text."""
    tile = ", ".join(f"{key} {value}" for key, value in entry["tile"].items())
    return (
        f"{entry['rows']:>3} rows, {entry['out_features']} x {entry['in_features']}: a step takes "
        f"{entry['microseconds']:.1f} us with {tile}; {entry['default_microseconds']:.1f} us with the default"
    )


def write(path: Path, device_name: str, entries: Sequence[Entry]) -> None:
    """Write the file with one entry per line, sorted to keep the diff of a new run small."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = ",\n  ".join(json.dumps(entry) for entry in sorted(entries, key=_key))
    head = f'{{"device": {json.dumps(device_name)}, "torch": {json.dumps(str(torch.__version__))},'
    path.write_text(f'{head}\n "entries": [\n  {rows}\n]}}\n')
    tuned.read_entries(path)


def choose(default: Tile | None, seconds: Mapping[Tile | None, float]) -> Tile | None:
    """The fastest, or the default if the gain is noise."""
    best = min(seconds, key=lambda tile: seconds[tile])
    return best if seconds[default] > (1.0 + WORTH) * seconds[best] else default


def _key(entry: Entry) -> tuple[Any, ...]:
    return entry["dtype"], entry["out_features"], entry["in_features"], entry["rows"]


def default_tile(rows: int, out_features: int, in_features: int, itemsize: int, device: torch.device) -> Tile | None:
    """The kernel's choice without tuning; None: torch's product."""
    nvidia = Target.of(device).kind == "cuda"
    return tile_for(rows, out_features, in_features, itemsize, nvidia, on_hopper(device))


def run_with_tile(x: torch.Tensor, weight: torch.Tensor, tile: Tile) -> torch.Tensor:
    """``x W^T`` by our kernel with this tile."""
    from atom_core.kernels.linear.triton_kernel import product as multiply  # needs triton, which a CPU may lack

    overlap = overlaps(Target.of(x.device))
    return multiply(x, weight, None, tile=tile, overlap=overlap)
