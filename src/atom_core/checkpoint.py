"""Read the headers and tensors of a checkpoint directory of safetensors files.

The format (https://huggingface.co/docs/safetensors): eight bytes of header length, a JSON header with each tensor's
dtype, shape and byte range, then the bytes. The headers show truncated files and tensors that do not fit within
milliseconds, before anything is loaded.
"""

from __future__ import annotations

import fnmatch
import json
import struct
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open

from atom_core.language_model import TIED, alone, of_text

SINGLE_FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"
#: Where there is no index, the files of the first pattern that matches hold the model; other files are not read.
WEIGHT_FILES = (SINGLE_FILE, "model-*.safetensors", "*.safetensors")
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


@dataclass(frozen=True)
class TensorInfo:
    """One stored tensor."""

    file: Path
    dtype: str
    """The safetensors name: "BF16", "F8_E4M3", ..."""
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Checkpoint:
    """A directory of safetensors files."""

    directory: Path
    tensors: Mapping[str, TensorInfo]

    @classmethod
    def open(cls, directory: Path) -> Checkpoint:
        """Read the headers of the model's files in ``directory``; see :func:`choose_files`.

        Raises:
            ValueError: there are no safetensors files (pickles are not read), or a file is truncated or damaged.
        """
        # An interrupted download leaves links to missing files in a Hugging Face cache.
        names = sorted(path.name for path in directory.glob("*.safetensors") if path.exists())
        if not names:
            pickles = sorted(path.name for pattern in _PICKLES for path in directory.glob(pattern))
            found = (
                f"it holds pickles ({', '.join(pickles[:3])}), which can run code when opened and are never read; "
                "convert them to safetensors"
                if pickles
                else "it holds none"
            )
            raise ValueError(f"{directory} has no *.safetensors file: {found}.")
        indexed = read_index(directory / INDEX) if (directory / INDEX).exists() else None
        chosen = choose_files(str(directory), names, indexed)
        return cls(directory, _read_headers(directory / name for name in chosen))

    @classmethod
    def of_files(cls, directory: Path, pattern: str) -> Checkpoint:
        """Read the headers of the files in ``directory`` whose names match ``pattern``, if any.

        Raises:
            ValueError: a file is truncated or damaged.
        """
        return cls(directory, _read_headers(sorted(directory.glob(pattern))))

    def tensor(self, name: str) -> torch.Tensor:
        """One tensor, as a view of its memory-mapped file."""
        with safe_open(self.tensors[name].file, framework="pt") as file:
            return cast(torch.Tensor, file.get_tensor(name))

    def load(self) -> Iterator[tuple[str, torch.Tensor]]:
        """All tensors as (name, view of the memory-mapped file), file by file."""
        for path in dict.fromkeys(info.file for info in self.tensors.values()):
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 - a safetensors handle is no mapping
                    yield name, file.get_tensor(name)

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """As :meth:`load`, for the tensors of these ``names``."""
        by_file: dict[Path, list[str]] = {}
        for name in names:
            by_file.setdefault(self.tensors[name].file, []).append(name)
        for path, wanted in by_file.items():
            with safe_open(path, framework="pt") as file:
                for name in wanted:
                    yield name, file.get_tensor(name)


def choose_files(where: str, names: Collection[str], indexed: Collection[str] | None) -> list[str]:
    """Choose the files that hold the model, as Transformers and the frameworks do.

    Other files are not read: Mistral's releases contain a second copy of the model as ``consolidated.safetensors``.

    Args:
        where: the folder or the hub's name of the repository, for errors.
        names: all safetensors files there.
        indexed: the files that the index names; None without an index.

    Raises:
        ValueError: the index names missing files, or leaves ``model.safetensors`` out.
    """
    if indexed is None:
        for pattern in WEIGHT_FILES:
            if chosen := sorted(fnmatch.filter(names, pattern)):
                return chosen
        return sorted(names)
    if absent := sorted(set(indexed) - set(names)):
        raise ValueError(f"{where}: {INDEX} names files that are not there: {', '.join(absent)}.")
    if SINGLE_FILE in names and SINGLE_FILE not in indexed:
        raise ValueError(
            f"{where} holds two models: {SINGLE_FILE}, which Transformers reads, and the files that {INDEX} names, "
            f"which vLLM and SGLang may read: {', '.join(sorted(indexed)[:3])}. Remove one."
        )
    return sorted(indexed)


def config_of(directory: Path) -> dict[str, Any]:
    """The parsed ``config.json`` of a checkpoint, corrected by its weights.

    As in Transformers, a head in the files that differs from the embedding overrides ``tie_word_embeddings``.

    Raises:
        ValueError: see :func:`read_config_json`.
    """
    values = read_config_json(directory)
    if of_text(values).get(TIED) is True and has_untied_head(directory):
        values[TIED] = False
    return values


def has_untied_head(directory: Path) -> bool:
    """Whether the files have a head whose values differ from the embedding's."""
    try:
        checkpoint = Checkpoint.open(directory)
    except ValueError:  # reported when the files are compared with the model
        return False
    names = {alone(name): name for name in checkpoint.tensors}
    if not {HEAD, EMBEDDING} <= names.keys():
        return False
    return heads_differ(checkpoint.tensor(names[HEAD]), checkpoint.tensor(names[EMBEDDING]))


def heads_differ(head: torch.Tensor, embedding: torch.Tensor) -> bool:
    """Whether a head of the embedding's shape has other values."""
    return head.shape == embedding.shape and not torch.equal(head.to(embedding.dtype), embedding)


def read_config_json(directory: Path) -> dict[str, Any]:
    """The parsed ``config.json`` of a checkpoint.

    Raises:
        ValueError: the file is missing or is not a JSON object, or its ``text_config`` is not one.
    """
    path = directory / "config.json"
    if not path.is_file():
        raise ValueError(f"{directory} has no config.json: it is not a Hugging Face checkpoint directory.")
    try:
        values = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not valid JSON: {error}.") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path} holds a {type(values).__name__}, not a JSON object.")
    try:
        of_text(values)  # which every reader goes on with
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    return values


def read_index(path: Path) -> set[str]:
    """The names of the files that an index lists.

    Raises:
        ValueError: the file is not an index.
    """
    try:
        names = set(json.loads(path.read_text())["weight_map"].values())
        if not names or not all(isinstance(name, str) for name in names):
            raise TypeError(f"it names {sorted(map(str, names)) or 'no files'}")
        return names
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is not an index of files: it has no readable 'weight_map' ({error}).") from error


def _read_headers(paths: Iterable[Path]) -> dict[str, TensorInfo]:
    return {name: info for path in paths for name, info in _read_header(path).items()}


def _read_header(path: Path) -> dict[str, TensorInfo]:
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else size
        if length > size - 8:
            raise ValueError(f"{path} is truncated or not a safetensors file: {size} bytes do not hold its header.")
        content = file.read(length)
    try:
        with safe_open(path, framework="pt"):
            damaged = ""
    except SafetensorError as error:
        # The library finds offsets that overlap, are negative, or leave bytes out.
        damaged = str(error)
    try:
        header: dict[str, Any] = json.loads(content)
        header.pop("__metadata__", None)
        tensors = {name: TensorInfo(path, entry["dtype"], tuple(entry["shape"])) for name, entry in header.items()}
        ends = {name: 8 + length + entry["data_offsets"][1] for name, entry in header.items()}
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is not a safetensors file: its header cannot be read ({error}).") from error
    expected = max(ends.values(), default=8 + length)
    if size != expected:
        truncated = sorted(name for name, end in ends.items() if end > size)
        lost = f"; beyond its end: {', '.join(truncated[:5])}" if truncated else ""
        raise ValueError(f"{path} is damaged: {size} bytes where its header describes {expected}{lost}.")
    if damaged:
        raise ValueError(f"{path} is damaged: {damaged}.")
    return tensors
