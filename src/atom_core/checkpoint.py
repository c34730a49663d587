"""A checkpoint directory: safetensors files and what their headers say, read without touching the tensors.

The format (https://huggingface.co/docs/safetensors): eight bytes of header length, a JSON header with each tensor's
dtype, shape and byte range, then the bytes. A header is enough to find a truncated file or a tensor that does not fit,
in milliseconds and before anything is loaded.
"""

from __future__ import annotations

import fnmatch
import json
import struct
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open

SINGLE_FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"
#: Names of the files that hold a model where no index says it, the first that there are: what is beside is not read.
WEIGHT_FILES = (SINGLE_FILE, "model-*.safetensors", "*.safetensors")
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
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
        # A hub's cache has links to what is not there where a download was cut off.
        files = sorted(path for path in directory.glob("*.safetensors") if path.exists())
        if not files:
            pickles = sorted(path.name for pattern in _PICKLES for path in directory.glob(pattern))
            found = (
                f"it holds pickles ({', '.join(pickles[:3])}), which can run code when opened and are never read; "
                "convert them to safetensors"
                if pickles
                else "it holds none"
            )
            raise ValueError(f"{directory} has no *.safetensors file: {found}.")
        tensors: dict[str, TensorInfo] = {}
        for path in _model_files(directory, files):
            tensors.update(_read_header(path))
        return cls(directory, tensors)

    @classmethod
    def of_files(cls, directory: Path, pattern: str) -> Checkpoint:
        """Read the headers of the files in ``directory`` whose names match ``pattern``; there may be none.

        Raises:
            ValueError: as :meth:`open`, of a file.
        """
        tensors: dict[str, TensorInfo] = {}
        for path in sorted(directory.glob(pattern)):
            tensors.update(_read_header(path))
        return cls(directory, tensors)

    def tensor(self, name: str) -> torch.Tensor:
        """One tensor, a view of its mapped file."""
        with safe_open(self.tensors[name].file, framework="pt") as file:
            return cast(torch.Tensor, file.get_tensor(name))

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


def choose_files(where: str, names: Collection[str], indexed: Collection[str] | None) -> list[str]:
    """The files that hold the model, as Transformers and the frameworks choose them.

    Others may lie beside them: a release of Mistral's has the same model once more as ``consolidated.safetensors``.

    Args:
        where: a folder, or what a hub calls it.
        names: of all safetensors files there.
        indexed: of those that an index names; None: there is no index.

    Raises:
        ValueError: an index that names files which are not there, or that leaves ``model.safetensors`` out.
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


def _model_files(directory: Path, files: Sequence[Path]) -> list[Path]:
    """See :func:`choose_files`."""
    index = directory / INDEX
    indexed = read_index(index) if index.exists() else None
    return [directory / name for name in choose_files(str(directory), [path.name for path in files], indexed)]


def config_of(directory: Path) -> dict[str, Any]:
    """The parsed ``config.json`` of a checkpoint, with what its weights say otherwise.

    Where it says that embedding and head are one, and the files have another head, the files count, as in Transformers.

    Raises:
        ValueError: see :func:`read_config_json`.
    """
    values = read_config_json(directory)
    if values.get("tie_word_embeddings") is True and has_own_head(directory):
        values["tie_word_embeddings"] = False
    return values


def has_own_head(directory: Path) -> bool:
    """Whether the files have a head whose numbers are not those of the embedding."""
    try:
        checkpoint = Checkpoint.open(directory)
    except ValueError:  # said where the files are compared with the model
        return False
    if not {HEAD, EMBEDDING} <= checkpoint.tensors.keys():
        return False
    return is_another_head(checkpoint.tensor(HEAD), checkpoint.tensor(EMBEDDING))


def is_another_head(head: torch.Tensor, embedding: torch.Tensor) -> bool:
    """Whether a head of the embedding's shape has other numbers."""
    return head.shape == embedding.shape and not torch.equal(head.to(embedding.dtype), embedding)


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


def read_index(path: Path) -> set[str]:
    """The names of the files that an index says to hold the checkpoint.

    Raises:
        ValueError: it is none.
    """
    try:
        names = set(json.loads(path.read_text())["weight_map"].values())
        if not names or not all(isinstance(name, str) for name in names):
            raise TypeError(f"it names {sorted(map(str, names)) or 'no files'}")
        return names
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
        with safe_open(path, framework="pt"):
            damaged = ""
    except SafetensorError as error:
        # The library's own word: offsets that overlap, are negative, or leave bytes out.
        damaged = str(error)
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
    if damaged:
        raise ValueError(f"{path} is damaged: {damaged}.")
    return tensors
