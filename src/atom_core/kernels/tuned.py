"""The fastest measured tiles by device and shape, in small JSON files beside an op's kernels.

`atom-plugin bench kernels --tune` writes them; serving only reads them. ``<op>/tuned/NVIDIA_H200.json``::

    {
        "device": "NVIDIA H200",
        "entries": [
            {
                "rows": 1,
                "out_features": 4096,
                "in_features": 4096,
                "dtype": "bfloat16",
                "tile": {"kernel": "row", "rows": 4, "columns": 1024, "warps": 4, "stages": 1, "early": true},
                "microseconds": 1520.1,
                "default_microseconds": 1529.6,
            }
        ],
    }

The tile ``{"kernel": "torch"}`` says that torch's product is the fastest. The figures are the times of a decode step
of a model, cut to some layers, with this tile and with the default.
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

#: The fields of a kernel's own tile by name: strings, booleans and integers.
Tile = Mapping[str, Any]

_SIZES = ("rows", "out_features", "in_features")
_FIGURES = ("microseconds", "default_microseconds")


class Shape(NamedTuple):
    """One product: rows of the input, sizes of the weight, and its dtype without "torch."."""

    rows: int
    out_features: int
    in_features: int
    dtype: str


def lookup(
    op_folder: Path, device_name: str, rows: int, out_features: int, in_features: int, dtype: str
) -> Tile | None:
    """The tile for a product on a device, or None if nothing was measured: the kernel then uses its default.

    If this number of rows was not measured, the tile is that of the next larger number that was, less than twice as
    large: a tile of many rows says nothing of few. The kernel builds its own tile from the result; see
    :func:`atom_core.kernels.linear.tiles.chosen_tile`.

    Args:
        op_folder: the kernel's folder, with ``tuned/`` in it.
        device_name: the result of ``torch.cuda.get_device_name()``.
        rows, out_features, in_features, dtype: see :class:`Shape`.

    Raises:
        ValueError: see :func:`load`.
    """
    return _find(op_folder, device_name, Shape(rows, out_features, in_features, dtype))


@functools.lru_cache(maxsize=4096)
def _find(op_folder: Path, device_name: str, shape: Shape) -> Tile | None:
    known = load(op_folder, device_name)
    measured = [it.rows for it in known if it[1:] == shape[1:] and shape.rows <= it.rows < 2 * shape.rows]
    return known[shape._replace(rows=min(measured))] if measured else None


@functools.lru_cache
def load(op_folder: Path, device_name: str) -> Mapping[Shape, Tile]:
    """All tiles of an op for a device; empty if the device has no file.

    Raises:
        ValueError: the file is damaged; the message names it and the entry.
    """
    path = tuned_file(op_folder, device_name)
    if not path.is_file():
        return {}
    return {_shape(entry): dict(entry["tile"]) for entry in read_entries(path)}


def tuned_file(op_folder: Path, device_name: str) -> Path:
    """The file with an op's tiles for a device, named after it with underscores for other characters than A-Za-z0-9."""
    return op_folder / "tuned" / f"{re.sub('[^A-Za-z0-9]+', '_', device_name).strip('_')}.json"


def read_entries(path: Path) -> list[dict[str, Any]]:
    """The checked entries of a file, tiles and figures.

    Raises:
        ValueError: the file is invalid; the message names what is wrong.
    """
    try:
        found = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}.") from error
    entries = found.get("entries") if isinstance(found, dict) else None
    if not isinstance(entries, list):
        raise ValueError(f"{path} has no list of 'entries'; `atom-plugin bench kernels --tune` makes such files.")
    shapes: set[Shape] = set()
    for index, entry in enumerate(entries):
        if reason := _why_wrong(entry):
            raise ValueError(f"{path}: entry {index} {reason}.")
        shape = _shape(entry)
        if shape in shapes:
            raise ValueError(f"{path}: entry {index} repeats {shape}.")
        shapes.add(shape)
    return entries


def _shape(entry: Mapping[str, Any]) -> Shape:
    return Shape(*(entry[name] for name in Shape._fields))


def _why_wrong(entry: object) -> str | None:
    """What is wrong with an entry of a file, or None."""
    if not isinstance(entry, dict):
        return f"is a {type(entry).__name__}, not an object"
    wanted = {*Shape._fields, "tile", *_FIGURES}
    if set(entry) != wanted:
        return f"has the keys {sorted(entry)}, not {sorted(wanted)}"
    if not isinstance(entry["dtype"], str):
        return f"has dtype={entry['dtype']!r}, which is no name"
    for name in _SIZES:
        if not _is_count(entry[name], 1):
            return f"has {name}={entry[name]!r}; a positive integer is needed"
    tile = entry["tile"]
    if not isinstance(tile, dict) or not tile:
        return f"has tile={tile!r}; the fields of a kernel's tile are needed"
    for name, value in tile.items():
        if not (isinstance(value, (str, bool)) or _is_count(value, 0)):
            return f"has a tile with {name}={value!r}; a name, a whole number, true or false is needed"
    for name in _FIGURES:
        if isinstance(entry[name], bool) or not isinstance(entry[name], (int, float)):
            return f"has {name}={entry[name]!r}, which is no number"
        if not (math.isfinite(entry[name]) and entry[name] > 0):
            return f"has {name}={entry[name]!r}; a finite number above 0 is needed"
    return None


def _is_count(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least
