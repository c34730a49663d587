"""What is supported: architecture x framework x quantisation x device, derived from the core's model registry.

The README's table, the documentation and `atom-plugin models` are made from `support_rows`, so none can drift from it.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from atom_core.models.registry import MODELS
from atom_core.quant import SUPPORTED

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True)
class FrameworkSupport:
    """What one adapter can run."""

    framework: str
    quantizations: tuple[str, ...]
    devices: tuple[str, ...]
    refuses: tuple[tuple[str, str], ...] = ()
    """A quantisation of one architecture's own checkpoints, and a device where the framework itself refuses it."""


@dataclass(frozen=True)
class SupportRow:
    """One architecture under one framework, at one quantisation, on one kind of device."""

    architecture: str
    family: str
    framework: str
    quantization: str
    device: str


FRAMEWORKS = (
    FrameworkSupport("vllm", quantizations=SUPPORTED, devices=("cpu", "cuda", "rocm")),
    FrameworkSupport("sglang", SUPPORTED, devices=("cpu", "cuda", "rocm"), refuses=(("mxfp4", "cpu"),)),
)


def support_rows() -> tuple[SupportRow, ...]:
    """Every supported combination."""
    return tuple(
        SupportRow(entry.architecture, entry.family, support.framework, quantization, device)
        for entry in MODELS.values()
        for support in FRAMEWORKS
        for quantization in (support.quantizations if entry.quantized else ("none", *entry.own_quantizations))
        for device in support.devices
        if quantization not in entry.own_quantizations or (quantization, device) not in support.refuses
    )


_HEADINGS = ("Architecture", "Family", "Framework", "Quantisation", "Devices")


def _lines(rows: Sequence[SupportRow]) -> list[tuple[str, ...]]:
    """One line for all devices and quantisations of an architecture and framework."""
    cells: dict[tuple[str, str, str], tuple[dict[str, None], dict[str, None]]] = {}
    for row in rows:
        quantizations, devices = cells.setdefault((row.architecture, row.family, row.framework), ({}, {}))
        quantizations[row.quantization] = None
        devices[row.device] = None
    return [(*key, ", ".join(quantizations), ", ".join(devices)) for key, (quantizations, devices) in cells.items()]


def as_table(rows: Sequence[SupportRow]) -> Table:
    """For a terminal."""
    from rich.table import Table

    table = Table(*_HEADINGS)
    for line in _lines(rows):
        table.add_row(*line)
    return table


def as_markdown(rows: Sequence[SupportRow]) -> str:
    """For a page."""
    lines = [_HEADINGS, tuple("---" for _ in _HEADINGS)]
    lines += [(f"`{architecture}`", *rest) for architecture, *rest in _lines(rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def as_json(rows: Sequence[SupportRow]) -> str:
    """For a program: one object a combination."""
    return json.dumps([dataclasses.asdict(row) for row in rows], indent=2)
