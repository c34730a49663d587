"""Folders as they are found, with more in them than one model, each done to a copy; and the same as a hub's names.

Files that must not be read hold the same tensors with other numbers.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from atom_core.checkpoint import INDEX, SINGLE_FILE

QWEN3 = Path(__file__).parents[1] / "checkpoints" / "qwen3"
HALVES = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
_COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass(frozen=True)
class Layout:
    """What is done to a folder with one file, and what must be said of it; None: it answers as before."""

    change: Callable[[Path], None]
    says: str | None = None


def _save(folder: Path, name: str, tensors: Mapping[str, torch.Tensor], factor: float = 1.0) -> None:
    save_file({it: tensor * factor for it, tensor in tensors.items()}, folder / name, {"format": "pt"})


def _shard(folder: Path, names: tuple[str, str] = HALVES) -> None:
    """Two files and an index, in place of one file."""
    tensors = load_file(folder / SINGLE_FILE)
    order = sorted(tensors)
    held = {names[0]: order[::2], names[1]: order[1::2]}
    for file, those in held.items():
        _save(folder, file, {name: tensors[name] for name in those})
    (folder / INDEX).write_text(json.dumps({"weight_map": {it: file for file, those in held.items() for it in those}}))
    (folder / SINGLE_FILE).unlink()


def _beside(name: str, then: Callable[[Path], None] = lambda folder: None) -> Callable[[Path], None]:
    """Another file of the same tensors with other numbers, and what is done besides."""

    def change(folder: Path) -> None:
        tensors = load_file(folder / SINGLE_FILE)
        then(folder)
        _save(folder, name, tensors, -1.5)

    return change


def _without_a_half(folder: Path) -> None:
    _shard(folder)
    (folder / HALVES[1]).unlink()


def _of_another_head(folder: Path) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "tie_word_embeddings": True}))


LAYOUTS = {
    "a release of Mistral's": Layout(_beside("consolidated.safetensors")),
    "a sharded release of Mistral's": Layout(_beside("consolidated.safetensors", _shard)),
    "shards beside some of an earlier save": Layout(_beside("model-00001-of-00003.safetensors", _shard)),
    "shards of other names beside a release of Mistral's": Layout(
        _beside("consolidated.safetensors", lambda folder: _shard(folder, (HALVES[0], "mtp.safetensors")))
    ),
    "tied by config.json, another head in the file": Layout(_of_another_head),
    "two models": Layout(_beside(SINGLE_FILE, _shard), f"holds two models: {SINGLE_FILE}, which Transformers reads"),
    "a shard that is not there": Layout(_without_a_half, f"{INDEX} names files that are not there: {HALVES[1]}"),
    "no weights": Layout(lambda folder: (folder / SINGLE_FILE).unlink(), "has no *.safetensors file"),
}
SERVED = [name for name, layout in LAYOUTS.items() if layout.says is None]
REFUSED = [name for name, layout in LAYOUTS.items() if layout.says is not None]


def laid_out(name: str, parent: Path) -> Path:
    """A copy of Qwen3's checkpoint under `parent`, laid out in the way of `LAYOUTS` that `name` says."""
    folder = parent / name.replace(" ", "-").replace(",", "").replace("'", "")
    shutil.copytree(QWEN3, folder)
    LAYOUTS[name].change(folder)
    return folder


def on_hub(folder: Path, home: Path) -> str:
    """A name under which Hugging Face's cache in `home` has the folder, as if it had been downloaded."""
    repository = home / "hub" / f"models--tests--{folder.name}"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(_COMMIT)
    blobs, snapshot = repository / "blobs", repository / "snapshots" / _COMMIT
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    for number, path in enumerate(sorted(folder.iterdir())):
        shutil.copy(path, blobs / f"{number:040x}")
        (snapshot / path.name).symlink_to(Path("..", "..", "blobs", f"{number:040x}"))
    return f"tests/{folder.name}"


def all_on_hub(parent: Path, home: Path) -> dict[tuple[str, str], str]:
    """Each of `LAYOUTS` as a model is named: a "folder" under `parent`, and a "name" that the cache in `home` has."""
    found = {}
    for layout in LAYOUTS:
        folder = laid_out(layout, parent)
        found[layout, "folder"], found[layout, "name"] = str(folder), on_hub(folder, home)
    return found


def hub_environ(home: Path) -> dict[str, str]:
    """Variables with which that cache is all there is."""
    return {"HF_HOME": str(home), "HF_HUB_OFFLINE": "1"}
