"""A checkpoint directory: safetensors files and what their headers say, read without touching the tensors.

The format (https://huggingface.co/docs/safetensors): eight bytes of header length, a JSON header with each tensor's
dtype, shape and byte range, then the bytes. A header is enough to find a truncated file or a tensor that does not fit,
in milliseconds and before anything is loaded.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


@dataclass(frozen=True)
class TensorInfo:
    """One stored tensor."""

    file: Path
    dtype: str
    """As safetensors spells it: "BF16", "F8_E4M3", ..."""
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Checkpoint:
    """A directory of safetensors files."""

    directory: Path
    tensors: Mapping[str, TensorInfo]

    @classmethod
    def open(cls, directory: Path) -> Checkpoint:
        """Read the headers of every safetensors file in ``directory``.

        Raises:
            ValueError: no such files (pickles are not read), or a file that is cut off or not safetensors.
        """
        files = sorted(directory.glob("*.safetensors"))
        if not files:
            pickles = sorted(path.name for pattern in _PICKLES for path in directory.glob(pattern))
            found = (
                f"it holds pickles ({', '.join(pickles[:3])}), which can run code when opened and are never read; "
                "convert them to safetensors"
                if pickles
                else "it holds none"
            )
            raise ValueError(f"{directory} has no *.safetensors file: {found}.")
        index = directory / "model.safetensors.index.json"
        if index.exists():
            wanted = _read_index(index)
            absent = sorted(wanted - {path.name for path in files})
            if absent:
                raise ValueError(f"{index} names files that are not there: {', '.join(absent)}.")
            files = [path for path in files if path.name in wanted]
        tensors: dict[str, TensorInfo] = {}
        for path in files:
            tensors.update(_read_header(path))
        return cls(directory, tensors)

    def load(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, tensor) of everything, file by file; tensors are views of the mapped files."""
        for path in dict.fromkeys(info.file for info in self.tensors.values()):
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 - a safetensors handle is no mapping
                    yield name, file.get_tensor(name)

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, tensor) of some of them, file by file."""
        by_file: dict[Path, list[str]] = {}
        for name in names:
            by_file.setdefault(self.tensors[name].file, []).append(name)
        for path, wanted in by_file.items():
            with safe_open(path, framework="pt") as file:
                for name in wanted:
                    yield name, file.get_tensor(name)


def read_config_json(directory: Path) -> dict[str, Any]:
    """The parsed ``config.json`` of a checkpoint.

    Raises:
        ValueError: there is none, or it is not a JSON object.
    """
    path = directory / "config.json"
    if not path.is_file():
        raise ValueError(f"{directory} has no config.json: it is no Hugging Face checkpoint directory.")
    try:
        values = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not valid JSON: {error}.") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path} holds a {type(values).__name__}, not a JSON object.")
    return values


def _read_index(path: Path) -> set[str]:
    """The names of the files that hold the checkpoint."""
    try:
        return set(json.loads(path.read_text())["weight_map"].values())
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is no index of files: it has no readable 'weight_map' ({error}).") from error


def _read_header(path: Path) -> dict[str, TensorInfo]:
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else size
        if length > size - 8:
            raise ValueError(f"{path} is cut off or is no safetensors file: {size} bytes do not hold its header.")
        content = file.read(length)
    try:
        header: dict[str, Any] = json.loads(content)
        header.pop("__metadata__", None)
        tensors = {name: TensorInfo(path, entry["dtype"], tuple(entry["shape"])) for name, entry in header.items()}
        ends = {name: 8 + length + entry["data_offsets"][1] for name, entry in header.items()}
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is no safetensors file: its header cannot be read ({error}).") from error
    expected = max(ends.values(), default=8 + length)
    if size != expected:
        cut = sorted(name for name, end in ends.items() if end > size)
        lost = f"; beyond its end: {', '.join(cut[:5])}" if cut else ""
        raise ValueError(f"{path} is damaged: {size} bytes where its header describes {expected}{lost}.")
    return tensors
