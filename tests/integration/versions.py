"""Checkpoints in two versions, between which a server that runs is moved, and bad ones that it must refuse."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.integration.questions import checkpoint
from tests.unit.core.fp8_checkpoints import FORMATS, Format, make_fp8

#: A tensor that every family has.
NAME = "model.layers.3.self_attn.o_proj.weight"


@dataclass(frozen=True, eq=False)
class Case:
    """One kind of model: a family, and how its weights are stored or served.

    Args:
        name: of the case.
        family: of the trained checkpoint.
        form: the FP8 that it is stored in; None: as it is.
        quantization: the frameworks' option of that name.
        options: further ones of an engine.
    """

    name: str
    family: str
    form: Format | None = None
    quantization: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.name

    def make(self, folder: Path) -> tuple[Path, Path]:
        """Write both versions."""
        old, new = folder / "old", folder / "new"
        if self.form is None:
            shutil.copytree(checkpoint(self.family), old)
        else:
            make_fp8(Path(checkpoint(self.family)), old, self.form)
        make_other(old, new)
        return old, new


CASES = (
    Case("dense, bf16", "qwen3"),
    Case("dense, stored fp8", "qwen3", FORMATS[1]),
    Case("dense, fp8 made at load", "qwen3", quantization="fp8"),
    Case("mixture, bf16", "qwen3_moe"),
    Case("mixture, stored fp8", "qwen3_moe", FORMATS[5]),
    Case("mixture, fp8 made at load", "qwen3_moe", quantization="fp8"),
    Case("mla, bf16", "deepseek_v3"),
    Case("mla, stored fp8", "deepseek_v3", FORMATS[2]),
    Case("mla, fp8 made at load", "deepseek_v3", quantization="fp8"),
    Case("hybrid, bf16", "qwen3_next"),
    Case("hybrid, fp8 made at load", "qwen3_5", quantization="fp8"),
)
#: Each model and each dtype once: the other pairs are run by `--thorough`, as they take as long again.
_FIRST = ("dense, bf16", "mixture, stored fp8", "mla, fp8 made at load", "hybrid, bf16")
FIRST = tuple(it for it in CASES if it.name in _FIRST)


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint."""
    return {name: it for path in sorted(folder.glob("*.safetensors")) for name, it in load_file(path).items()}


def make_other(source: Path, target: Path) -> None:
    """Write a checkpoint of the same model with other numbers: rows of its first and its last layers turn round."""
    tensors = tensors_of(source)
    last = max(int(name.split(".")[2]) for name in tensors if name.startswith("model.layers."))
    turned = (f"model.layers.{0}.", f"model.layers.{last}.")
    write(source, target, {name: it.flip(0) if name.startswith(turned) else it for name, it in tensors.items()})


def write(source: Path, target: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write ``tensors`` beside what else ``source`` has."""
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("*.safetensors*"))
    save_file({name: it.contiguous() for name, it in tensors.items()}, target / "model.safetensors", {"format": "pt"})


def _changed(change: Callable[[dict[str, torch.Tensor]], None]) -> Callable[[Path, Path], None]:
    def make(source: Path, target: Path) -> None:
        tensors = tensors_of(source)
        change(tensors)
        write(source, target, tensors)

    return make


def _cut(source: Path, target: Path) -> None:
    write(source, target, tensors_of(source))
    path = target / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])


def _another_class(tensors: dict[str, torch.Tensor]) -> None:
    tensors[NAME] = tensors[NAME].to(torch.float32).to(torch.uint8)


#: Makes a folder whose header is in order, and whose numbers FP8 cannot scale.
make_infinite = _changed(lambda it: it.update({NAME: torch.full_like(it[NAME], float("inf"))}))

#: How to make a bad folder of a good one, and what the refusal says beside the folder.
FAULTS: Mapping[str, tuple[Callable[[Path, Path], None], str]] = {
    "a tensor is missing": (_changed(lambda it: it.__delitem__(NAME)), f"missing (1): {NAME}"),
    "a tensor is misshapen": (
        _changed(lambda it: it.update({NAME: it[NAME][:-1]})),
        f"{NAME} in model.safetensors is [",
    ),
    "a tensor is of another dtype": (_changed(_another_class), f"{NAME} in model.safetensors is stored as U8"),
    "a tensor is unexpected": (
        _changed(lambda it: it.update({"model.layers.0.extra": it[NAME].clone()})),
        "unexpected (1): model.layers.0.extra",
    ),
    "a file is cut short": (_cut, "model.safetensors is damaged"),
}
