"""The supported combinations of architecture, framework, quantisation and device, from the core's model registry.

The README's table, the documentation and `atom-plugin models` are made from `support_rows`.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

from atom_core.models.registry import MODELS
from atom_core.quant import SUPPORTED

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True)
class FrameworkSupport:
    """The quantisations and devices of one adapter."""

    framework: str
    quantizations: tuple[str, ...]
    devices: tuple[str, ...]
    refuses: tuple[tuple[str, str], ...] = ()
    """Pairs of an architecture's own quantisation and a device on which the framework itself refuses it."""


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


#: Names in the documentation.
_NAMES: Mapping[str, str] = MappingProxyType({"vllm": "vLLM", "sglang": "SGLang"})
_WEIGHTS: Mapping[str, str] = MappingProxyType({"none": "16 or 32 bits", "fp8": "FP8", "mxfp4": "MXFP4"})

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
    """For a page: one line for each family."""
    families: dict[str, list[SupportRow]] = {}
    for row in rows:
        families.setdefault(row.family, []).append(row)
    headings = ("Family", "Architectures", "Frameworks", "Weights", "Devices")
    lines = [headings, tuple("---" for _ in headings), *(_folded(name, found) for name, found in families.items())]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _folded(family: str, rows: Sequence[SupportRow]) -> tuple[str, ...]:
    """A family's line; unsupported combinations of its cells are in brackets."""
    architectures = dict.fromkeys(row.architecture for row in rows)
    frameworks = dict.fromkeys(row.framework for row in rows)
    devices = dict.fromkeys(row.device for row in rows)
    supported = {(row.architecture, row.framework, row.quantization, row.device) for row in rows}
    weights = []
    for name in dict.fromkeys(row.quantization for row in rows):
        missing = dict.fromkeys(
            f"not by {_NAMES[framework]} on {device}"
            for architecture in architectures
            for framework in frameworks
            for device in devices
            if (architecture, framework, name, device) not in supported
        )
        shown = _WEIGHTS.get(name, name)
        weights.append(f"{shown} ({', '.join(missing)})" if missing else shown)
    shown_architectures = ", ".join(f"`{name}`" for name in architectures)
    shown_frameworks = ", ".join(_NAMES[name] for name in frameworks)
    return family, shown_architectures, shown_frameworks, ", ".join(weights), ", ".join(devices)


def as_json(rows: Sequence[SupportRow]) -> str:
    """For a program: one object for each combination."""
    return json.dumps([dataclasses.asdict(row) for row in rows], indent=2)
