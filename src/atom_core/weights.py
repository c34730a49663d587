"""Load checkpoint tensors into a model's parameters, or list everything that does not fit.

Layers state the checkpoint names of their parameters and this rank's shard of each tensor
(:mod:`atom_core.layers.parameters`); this module matches the names. An error lists all missing, unexpected and
misshapen tensors. Only the scales of an FP8 cache are optional. As in Transformers, layers beyond
``num_hidden_layers`` are not read.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from atom_core.checkpoint import EMBEDDING, HEAD, Checkpoint, heads_differ
from atom_core.config import ModelConfig
from atom_core.layers.parameters import MissingLayer, ParameterLayer, Placement, checkpoint_module
from atom_core.mixers.cache_scales import SCALE_NAMES, CacheScales
from atom_core.models.decoder import CheckpointModel
from atom_core.spellings import ExpertStack, respelled

#: Names in safetensors files; other dtypes keep torch's name.
_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.uint8: "U8",
}
_LISTED = 12  # names of each kind that an error lists


@dataclass(frozen=True)
class Slot:
    """Where one checkpoint tensor goes."""

    parameter_name: str
    placement: Placement
    layer: ParameterLayer
    path: str
    """The layer's path in the model."""


@dataclass
class Mismatch:
    """The tensors of a checkpoint that do not fit a model."""

    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    misshapen: list[str] = field(default_factory=list)

    def add_unknown(
        self, config: ModelConfig, slots: Mapping[str, Slot], name: str, shape: tuple[int, ...], where: str = ""
    ) -> None:
        """Add a tensor without a slot; if it is a stack of experts of a wrong shape, they are not missing."""
        stack = ExpertStack.of(config, name)
        if stack is None or (problem := stack.problem(shape, slots)) is None:
            self.unexpected.append(f"{name}{where}")
            return
        self.misshapen.append(f"{name}{where} {problem}")
        names = set(stack.names())
        self.missing = [it for it in self.missing if it not in names]

    def raise_if_any(
        self, architecture: str, what: str, advice: str = "Check that config.json belongs to these weights."
    ) -> None:
        """Raise a ValueError that lists all tensors; ``what`` is its subject, up to "does" or "do"."""
        kinds = (("missing", self.missing), ("unexpected", self.unexpected), ("misshapen", self.misshapen))
        found = [
            f"{kind} ({len(names)}): {', '.join(sorted(names)[:_LISTED])}{', ...' if len(names) > _LISTED else ''}"
            for kind, names in kinds
            if names
        ]
        if found:
            raise ValueError(f"{what} not fit {architecture}: {'; '.join(found)}. {advice}")


def expected_tensors(model: CheckpointModel) -> dict[str, Slot]:
    """Every tensor that ``model`` reads from a checkpoint, by checkpoint name."""
    slots: dict[str, Slot] = {}
    for path, module in model.named_modules():
        if isinstance(module, ParameterLayer) and path not in model.borrowed:
            slots.update(slots_of(path, module))
    return slots


def slots_of(path: str, layer: ParameterLayer) -> Iterator[tuple[str, Slot]]:
    """The slots of the layer at ``path``, for its current parameters."""
    for relative, name, placement in layer.placements():
        parameter = f"{path}.{placement.parameter_name or name}"
        yield f"{checkpoint_module(path, relative)}.{name}", Slot(parameter, placement, layer, path)


class Writer:
    """Writes checkpoint tensors into a model's layers; it opens a layer before the layer's first tensor.

    Args:
        slots: the model's.
        whole: the layers that will receive all of their tensors; None: all layers.
    """

    def __init__(self, slots: Mapping[str, Slot], whole: Container[ParameterLayer] | None = None) -> None:
        self.slots, self.whole = slots, whole
        self._opened: dict[ParameterLayer, dict[str, Slot]] = {}

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Copy this rank's shard of a tensor that has a slot and the right shape and dtype.

        Raises:
            ValueError: the tensor has invalid values; the message continues after the name.
        """
        layer = self.slots[name].layer
        if layer not in self._opened:
            layer.open_weights(self.whole is None or layer in self.whole)
            self._opened[layer] = dict(slots_of(self.slots[name].path, layer))
        self._opened[layer][name].placement.load(tensor)


def cache_scales(model: CheckpointModel) -> dict[str, CacheScales]:
    """The layers with cache scales, by every name that a checkpoint may give the scales."""
    return {
        f"{path.rpartition('.')[0]}.{name}": module
        for path, module in model.named_modules()
        if isinstance(module, CacheScales)
        for name in SCALE_NAMES
    }


def other_ranks_tensors(model: CheckpointModel) -> tuple[str, ...]:
    """Name prefixes of the tensors that only other ranks load."""
    prefixes: list[str] = []
    for path, module in model.named_modules():
        if isinstance(module, MissingLayer) or path in model.borrowed:
            prefixes.append(f"{path}.")
        elif isinstance(module, ParameterLayer):
            prefixes += (f"{checkpoint_module(path, relative)}." for relative in module.other_ranks_modules())
    return tuple(prefixes)


def load_weights(
    model: CheckpointModel, tensors: Iterable[tuple[str, torch.Tensor]], checkpoint: str = "given"
) -> set[str]:
    """Copy ``tensors`` into the parameters of ``model`` and leave its layers open.

    Sets ``model.unread`` to the checkpoint's layers beyond the model's last.

    Args:
        model: its parameters are overwritten.
        tensors: (checkpoint name, full tensor); each rank copies its own shard.
        checkpoint: the source, for errors.

    Returns:
        The names of all loaded parameters.

    Raises:
        ValueError: tensors are missing, unexpected, or of the wrong shape or dtype; or an FP8 cache's scale is invalid.
    """
    slots = expected_tensors(model)
    other_ranks = other_ranks_tensors(model)
    scales = cache_scales(model)
    found: dict[CacheScales, dict[str, torch.Tensor]] = {}
    missing, mismatch, writer = set(slots), Mismatch(), Writer(slots)
    head = TiedHeadCheck(model)
    unknown: dict[str, tuple[int, ...]] = {}
    for name, tensor in respelled(model.config, slots, tensors):
        head.check(name, tensor)
        if name in scales:
            found.setdefault(scales[name], {})[name] = tensor
            continue
        slot = slots.get(name)
        if slot is None:
            unknown[name] = tuple(tensor.shape)
            continue
        if name not in missing:
            mismatch.unexpected.append(f"{name} once more")
            continue
        missing.discard(name)
        if problem := slot.placement.problem(tuple(tensor.shape), dtype_name(tensor)):
            mismatch.misshapen.append(f"{name} {problem}")
            continue
        try:
            writer.write(name, tensor)
        except ValueError as error:
            mismatch.misshapen.append(f"{name} {error}")
    mismatch.missing = sorted(missing)
    model.unread = layers_beyond(model, unknown)
    for name, shape in unknown.items():
        if not ignored(model, name, other_ranks):
            mismatch.add_unknown(model.config, slots, name, shape)
    mismatch.raise_if_any(model.config.architecture, f"The checkpoint {checkpoint} does")
    for layer, of_layer in found.items():
        layer.adopt(of_layer)
    return {slot.parameter_name for slot in slots.values()}


class TiedHeadCheck:
    """Refuses a head that differs from the embedding it is tied to, which would be dropped otherwise."""

    def __init__(self, model: CheckpointModel) -> None:
        self._names = (HEAD, EMBEDDING) if model.config.tie_word_embeddings else ()
        self._found: dict[str, torch.Tensor] = {}

    def check(self, name: str, tensor: torch.Tensor) -> None:
        """Called for each tensor of the checkpoint.

        Raises:
            ValueError: the values of head and embedding differ.
        """
        if name not in self._names:
            return
        self._found[name] = tensor
        if len(self._found) < len(self._names):
            return
        if heads_differ(*(self._found.pop(name) for name in self._names)):
            raise ValueError(
                f"The files have {HEAD} with other values than {EMBEDDING}, but config.json says "
                "tie_word_embeddings=true. Set it to false, or remove the tensor."
            )


def check_checkpoint(model: CheckpointModel, checkpoint: Checkpoint) -> None:
    """Compare the files' headers with ``model``, which may be on the meta device; no tensor is loaded.

    Sets ``model.unread`` as :func:`load_weights` does.

    Raises:
        ValueError: as :func:`load_weights`, with the file of each tensor.
    """
    slots = expected_tensors(model)
    other_ranks, scales = other_ranks_tensors(model), cache_scales(model)
    tensors = dict(respelled(model.config, slots, checkpoint.tensors.items()))
    model.unread = layers_beyond(model, tensors)
    mismatch = Mismatch(missing=sorted(set(slots) - set(tensors)))
    for name, info in tensors.items():
        slot = slots.get(name)
        if slot is None:
            if name not in scales and not ignored(model, name, other_ranks):
                mismatch.add_unknown(model.config, slots, name, info.shape, f" in {info.file.name}")
        elif problem := slot.placement.problem(info.shape, info.dtype):
            mismatch.misshapen.append(f"{name} in {info.file.name} {problem}")
    mismatch.raise_if_any(model.config.architecture, f"The checkpoint {Path(checkpoint.directory)} does")


def layers_beyond(model: CheckpointModel, names: Collection[str]) -> range:
    """The consecutive layers that a checkpoint with these tensor ``names`` has after the model's last one.

    A layer counts only if it has an input norm, so a stray tensor with a later index stays unexpected. The
    configuration's draft layers are not counted.
    """
    config = model.config
    first = end = config.layers_before + config.num_layers
    while f"model.layers.{end}.input_layernorm.weight" in names:
        end += 1
    only_drafts = end - first <= config.draft_layers and f"model.layers.{first}.enorm.weight" in names
    return range(first, first if only_drafts else end)


def unread_layers(model: CheckpointModel, checkpoint: str) -> str | None:
    """The log line that names the layers of a checkpoint that were not read; None if all were."""
    if not model.unread:
        return None
    first, last = model.unread[0], model.unread[-1]
    which = f"layer {first} is" if first == last else f"layers {first} to {last} are"
    return f"num_hidden_layers={model.config.num_layers}: of {checkpoint}, {which} left unread"


def ignored(model: CheckpointModel, name: str, other_ranks: tuple[str, ...]) -> bool:
    """Whether to skip a tensor without a slot; ``other_ranks`` is from :func:`other_ranks_tensors`."""
    unread = (f"model.layers.{index}." for index in model.unread)
    return name.endswith(model.ignored_suffixes) or name.startswith((*model.ignored_prefixes, *other_ranks, *unread))


def dtype_name(tensor: torch.Tensor) -> str:
    """The tensor's dtype as safetensors spells it."""
    return _DTYPES.get(tensor.dtype, str(tensor.dtype).removeprefix("torch."))
