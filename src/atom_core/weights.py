"""Checkpoint tensors into a model's parameters, or a list of what does not fit.

Layers say how their parameters are named in checkpoints and which part of each tensor is this rank's
(:mod:`atom_core.layers.parameters`); here the names are matched. Nothing is skipped quietly: a tensor that is missing,
unexpected or misshapen is an error that lists them all. Scales of an FP8 cache alone may be there or not.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from atom_core.checkpoint import Checkpoint
from atom_core.layers.cache_scales import SCALE_NAMES, CacheScales
from atom_core.layers.parameters import MissingLayer, ParameterLayer, Placement, checkpoint_module
from atom_core.models.decoder import CheckpointModel

#: As safetensors spells them; the others are called what torch calls them.
_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.uint8: "U8",
}
_LISTED = 12  # names of a kind in an error; the rest is counted


@dataclass(frozen=True)
class Slot:
    """What one checkpoint tensor fills."""

    parameter_name: str
    placement: Placement


@dataclass
class Mismatch:
    """What does not fit between a model and a checkpoint."""

    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    misshapen: list[str] = field(default_factory=list)

    def raise_if_any(self, architecture: str, checkpoint: str) -> None:
        """Raise a ValueError that lists everything, if there is anything."""
        kinds = (("missing", self.missing), ("unexpected", self.unexpected), ("misshapen", self.misshapen))
        lines = [
            f"  {kind} ({len(names)}): {', '.join(sorted(names)[:_LISTED])}{', ...' if len(names) > _LISTED else ''}"
            for kind, names in kinds
            if names
        ]
        if lines:
            raise ValueError(
                "\n".join([f"The checkpoint {checkpoint} does not fit {architecture}:", *lines])
                + "\nCheck that config.json belongs to these weights."
            )


def expected_tensors(model: CheckpointModel) -> dict[str, Slot]:
    """Every tensor that ``model`` wants from a checkpoint, by its name there."""
    slots: dict[str, Slot] = {}
    for path, module in model.named_modules():
        if not isinstance(module, ParameterLayer):
            continue
        for relative, name, placement in module.placements():
            slots[f"{checkpoint_module(path, relative)}.{name}"] = Slot(
                f"{path}.{placement.held_by or name}", placement
            )
    return slots


def cache_scales(model: CheckpointModel) -> dict[str, CacheScales]:
    """Every name under which a checkpoint may have scales of a layer's cache, and the layer's."""
    return {
        f"{path.rpartition('.')[0]}.{name}": module
        for path, module in model.named_modules()
        if isinstance(module, CacheScales)
        for name in SCALE_NAMES
    }


def _elsewhere(model: CheckpointModel) -> tuple[str, ...]:
    """Prefixes of tensors that other ranks load alone."""
    prefixes: list[str] = []
    for path, module in model.named_modules():
        if isinstance(module, MissingLayer):
            prefixes.append(f"{path}.")
        elif isinstance(module, ParameterLayer):
            prefixes += (f"{checkpoint_module(path, relative)}." for relative in module.elsewhere())
    return tuple(prefixes)


def load_weights(
    model: CheckpointModel, tensors: Iterable[tuple[str, torch.Tensor]], checkpoint: str = "given"
) -> set[str]:
    """Copy ``tensors`` into the parameters of ``model``.

    Args:
        model: built, its parameters not yet meaningful.
        tensors: (checkpoint name, tensor); each is whole, this rank's part is cut here.
        checkpoint: what an error calls them.

    Returns:
        The names of all parameters that were loaded.

    Raises:
        ValueError: tensors are missing, unexpected, misshapen, or of a dtype that the model cannot have; or
            a scale of an FP8 cache is not one.
    """
    slots = expected_tensors(model)
    elsewhere = _elsewhere(model)
    scales = cache_scales(model)
    found: dict[CacheScales, dict[str, torch.Tensor]] = {}
    waiting = set(slots)
    mismatch = Mismatch()
    for name, tensor in tensors:
        if name in scales:
            found.setdefault(scales[name], {})[name] = tensor
            continue
        slot = slots.get(name)
        if slot is None:
            if not _ignored(model, name, elsewhere):
                mismatch.unexpected.append(name)
            continue
        waiting.discard(name)
        if problem := slot.placement.problem(tuple(tensor.shape), _dtype_of(tensor)):
            mismatch.misshapen.append(f"{name} {problem}")
            continue
        try:
            slot.placement.load(tensor)
        except ValueError as error:
            mismatch.misshapen.append(f"{name} {error}")
    mismatch.missing = sorted(waiting)
    mismatch.raise_if_any(model.config.architecture, checkpoint)
    for layer, of_layer in found.items():
        layer.adopt(of_layer)
    return {slot.parameter_name for slot in slots.values()}


def check_checkpoint(model: CheckpointModel, checkpoint: Checkpoint) -> None:
    """Compare the files' headers with what ``model`` (best built on the meta device) wants; nothing is loaded.

    Raises:
        ValueError: as :func:`load_weights`, with the file of each tensor.
    """
    slots = expected_tensors(model)
    elsewhere, scales = _elsewhere(model), cache_scales(model)
    mismatch = Mismatch(missing=sorted(set(slots) - set(checkpoint.tensors)))
    for name, info in checkpoint.tensors.items():
        slot = slots.get(name)
        if slot is None:
            if name not in scales and not _ignored(model, name, elsewhere):
                mismatch.unexpected.append(f"{name} in {info.file.name}")
        elif problem := slot.placement.problem(info.shape, info.dtype):
            mismatch.misshapen.append(f"{name} in {info.file.name} {problem}")
    mismatch.raise_if_any(model.config.architecture, str(Path(checkpoint.directory)))


def _ignored(model: CheckpointModel, name: str, elsewhere: tuple[str, ...]) -> bool:
    return name.endswith(model.ignored_suffixes) or name.startswith((*model.ignored_prefixes, *elsewhere))


def _dtype_of(tensor: torch.Tensor) -> str:
    return _DTYPES.get(tensor.dtype, str(tensor.dtype).removeprefix("torch."))
