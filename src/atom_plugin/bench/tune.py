"""The fastest tile of each product of few rows on this GPU, written where the kernel looks for it.

Every candidate is timed roughly, the best few again with care, the default among them; what wins by less than
:data:`WORTH` is noise, and the default stays. The file's figures are those of that second look. Nothing is tuned while
serving: see :mod:`atom_core.kernels.tuned`.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import atom_core.kernels.linear
from atom_core.config import ModelConfig
from atom_core.kernels import tuned
from atom_core.kernels.select import Target
from atom_core.kernels.triton_support import overlaps, why_no_triton
from atom_plugin.bench.cases import PRODUCT_ROWS, products
from atom_plugin.bench.device import capture, measure, require_gpu
from atom_plugin.bench.models import read_config

OP_FOLDER = Path(atom_core.kernels.linear.__file__).parent

#: How much faster than the default a tile must be.
WORTH = 1.02
#: Candidates that are looked at again.
_FINAL = 5
#: Shared memory of one program, where torch does not tell.
_SHARED_MEMORY = 64 << 10


@dataclass(frozen=True)
class Candidate:
    """A tile of the linear kernels, by the names of its fields."""

    kernel: str
    rows: int
    columns: int
    warps: int
    stages: int = 1
    early: bool = False
    fetch: int = 0
    tokens: int = 0


def candidates(
    num_rows: int,
    out_features: int,
    in_features: int,
    shared_memory: int = _SHARED_MEMORY,
    itemsize: int = 2,
    hopper: bool = False,
) -> list[Candidate]:
    """Tiles worth a try for a product.

    Args:
        num_rows: of the input.
        out_features, in_features: the weight's.
        shared_memory: bytes that one program may have.
        itemsize: bytes of one number of the weight.
        hopper: whether the kernel for that architecture can be used.
    """
    found: list[Candidate] = []
    whole = 1 << max(in_features - 1, 1).bit_length()
    if num_rows == 1:
        for rows, columns, warps in product((1, 2, 4, 8, 16), (256, 512, 1024, 2048, 4096, 8192), (4, 8)):
            # Numbers that a thread holds: too many spill, too few leave the memory waiting.
            held = rows * columns // (32 * warps)
            if rows > out_features or columns > whole or not 8 <= held <= 128:
                continue
            found += [Candidate("row", rows, columns, warps, early=early) for early in (False, True)]
            for stages in (2, 3):
                if stages * columns * (rows + 1) * itemsize <= shared_memory:
                    found += [Candidate("ring", rows, columns, warps, stages, early) for early in (False, True)]
    for rows, columns, stages, warps in product((16, 32, 64, 128), (64, 128, 256, 512), (2, 3, 4, 5), (4, 8)):
        taken = stages * columns * (rows * itemsize + 16 * 2)
        if 4096 <= rows * columns <= 32768 and columns <= whole and taken <= shared_memory:
            found += [Candidate("rows", rows, columns, warps, stages, early) for early in (False, True)]
    if hopper and num_rows > 1:
        inputs = max(8, 1 << (num_rows - 1).bit_length())
        for rows, columns, stages in product((64, 128), (64, 128, 256), (4, 5, 6, 7, 8, 10, 12)):
            taken = stages * columns * (rows + inputs) * itemsize
            if in_features % columns == 0 and stages * columns <= in_features and taken <= shared_memory:
                found += [Candidate("hopper", rows, columns, 4, stages, early) for early in (False, True)]
    return found


def tune_linear(models: Sequence[str], dtype: torch.dtype, output: Path | None, say: Callable[[str], None]) -> Path:
    """Time the candidates for every product of `models` and write the best; the file's other entries stay.

    Args:
        models: names, folders or files; see :mod:`atom_plugin.bench.models`.
        dtype: of weights and input.
        output: the folder to write to; None: beside the kernel.
        say: gets a line a shape.

    Returns:
        The file.

    Raises:
        ValueError: no GPU or no Triton, or a file that is there and damaged.
    """
    device = require_gpu()
    if reason := why_no_triton(Target.of(device)):
        raise ValueError(f"--tune: {reason}")
    name = torch.cuda.get_device_name(device)
    path = tuned.tuned_file(OP_FOLDER, name) if output is None else output / tuned.tuned_file(OP_FOLDER, name).name
    entries = {_key(entry): entry for entry in (tuned.read_entries(path) if path.exists() else ())}
    sizes = dict.fromkeys(
        (it.out_features, it.in_features)
        for model in models
        for it in products(ModelConfig.from_hf(read_config(model)))
    )
    for out_features, in_features in sizes:
        for rows in PRODUCT_ROWS:
            entry = _tune_one(rows, out_features, in_features, dtype, device)
            if entry is None:
                say(f"{rows:>3} rows, {out_features} x {in_features}: torch's")
                continue
            entries[_key(entry)] = entry
            say(line(entry))
            # After each, so that an interrupted run has not been for nothing.
            write(path, name, list(entries.values()))
    return path


def line(entry: Mapping[str, Any]) -> str:
    """An entry for a person."""
    tile = ", ".join(f"{key} {value}" for key, value in entry["tile"].items())
    return (
        f"{entry['rows']:>3} rows, {entry['out_features']} x {entry['in_features']}: "
        f"{entry['microseconds']:.2f} us ({entry['gigabytes_per_second']:.0f} GB/s) with {tile}; "
        f"default {entry['default_microseconds']:.2f} us"
    )


def write(path: Path, device_name: str, entries: Sequence[Mapping[str, Any]]) -> None:
    """The file as the loader reads it, an entry a line, sorted so that a new run shows as few differences as it can."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = ",\n  ".join(json.dumps(entry) for entry in sorted(entries, key=_key))
    head = f'{{"device": {json.dumps(device_name)}, "torch": {json.dumps(str(torch.__version__))},'
    path.write_text(f'{head}\n "entries": [\n  {rows}\n]}}\n')
    tuned.read_entries(path)


def choose(default: Candidate, seconds: Mapping[Candidate, float]) -> Candidate:
    """The fastest, or the default where that is as fast but for noise."""
    best = min(seconds, key=lambda tile: seconds[tile])
    return best if seconds[default] > WORTH * seconds[best] else default


def _key(entry: Mapping[str, Any]) -> tuple[Any, ...]:
    return entry["dtype"], entry["out_features"], entry["in_features"], entry["rows"]


@torch.inference_mode()
def _tune_one(
    rows: int, out_features: int, in_features: int, dtype: torch.dtype, device: torch.device
) -> dict[str, Any] | None:
    default = default_tile(rows, out_features, in_features, dtype.itemsize, device)
    if default is None:
        return None
    properties = torch.cuda.get_device_properties(device)
    shared_memory = int(getattr(properties, "shared_memory_per_block_optin", _SHARED_MEMORY))
    weight_bytes = out_features * in_features * dtype.itemsize
    copies = max(1, min(64, math.ceil(2 * properties.L2_cache_size / weight_bytes)))
    x = torch.randn(rows, in_features, device=device).to(dtype)
    weights = [
        torch.empty(out_features, in_features, dtype=dtype, device=device).normal_(0.0, in_features**-0.5)
        for _ in range(copies)
    ]
    expected = F.linear(x, weights[0]).float()

    def seconds(tile: Candidate, repetitions: int, sample_seconds: float) -> float | None:
        found = _try(x, weights[0], tile)
        if found is None or float((found.float() - expected).abs().max() / expected.abs().max()) > 0.02:
            return None
        calls = copies * math.ceil(16 / copies)

        def all_calls() -> None:
            for index in range(calls):
                run_with_tile(x, weights[index % copies], tile)

        graph = capture(all_calls)
        return measure(graph.replay, repetitions, sample_seconds, warm_seconds=0.02).median / calls

    worth = candidates(rows, out_features, in_features, shared_memory, dtype.itemsize, _on_hopper(device))
    tried = dict.fromkeys([default, *worth])
    # Most of the time would be that of compiling one behind the other.
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda tile: _try(x, weights[0], tile), tried))
    roughly = {tile: time for tile in tried if (time := seconds(tile, 3, 0.002)) is not None}
    final = dict.fromkeys([default, *sorted(roughly, key=lambda tile: roughly[tile])[:_FINAL]])
    carefully = {tile: time for tile in final if (time := seconds(tile, 15, 0.01)) is not None}
    best = choose(default, carefully)
    return {
        "rows": rows,
        "out_features": out_features,
        "in_features": in_features,
        "dtype": str(dtype).removeprefix("torch."),
        "tile": asdict(best),
        "microseconds": round(carefully[best] * 1e6, 3),
        "default_microseconds": round(carefully[default] * 1e6, 3),
        "gigabytes_per_second": round(weight_bytes / carefully[best] / 1e9, 1),
    }


@torch.inference_mode()
def _try(x: torch.Tensor, weight: torch.Tensor, tile: Candidate) -> torch.Tensor | None:
    """``x W^T`` with a tile; None where that is no candidate."""
    try:
        return run_with_tile(x, weight, tile)
    except Exception as error:
        # Triton's own say that a tile cannot be compiled or needs more than the GPU has.
        if type(error).__module__.partition(".")[0] == "triton":
            return None
        raise


def default_tile(
    rows: int, out_features: int, in_features: int, itemsize: int, device: torch.device
) -> Candidate | None:
    """The kernel's own choice where nothing is tuned; None: the product is torch's."""
    from atom_core.kernels.linear.tiles import tile_for  # needs triton, which a CPU may lack

    nvidia = Target.of(device).kind == "cuda"
    tile = tile_for(rows, out_features, in_features, itemsize, nvidia, _on_hopper(device))
    return None if tile is None else Candidate(**asdict(tile))


def _on_hopper(device: torch.device) -> bool:
    from atom_core.kernels.linear.tiles import on_hopper  # needs triton, which a CPU may lack

    return on_hopper(device)


def run_with_tile(x: torch.Tensor, weight: torch.Tensor, tile: Candidate) -> torch.Tensor:
    """``x W^T`` by our kernel with a tile of one's choice."""
    from atom_core.kernels.linear.tiles import Tile
    from atom_core.kernels.linear.triton_kernel import product as multiply  # needs triton, which a CPU may lack

    overlap = overlaps(Target.of(x.device))
    return multiply(x, weight, None, tile=Tile(**asdict(tile)), overlap=overlap)
