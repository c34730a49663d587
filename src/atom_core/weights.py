"""Checkpoint tensors into a model's parameters, or a list of what does not fit.

Layers say how their parameters are named in checkpoints and which part of each tensor is this rank's
(:mod:`atom_core.layers.parameters`); here the names are matched. Nothing is skipped quietly: a tensor that is missing,
unexpected or misshapen is an error that lists them all. Scales of an FP8 cache alone may be there or not, and layers
behind the model's last are left unread, as in Transformers: whoever asks for fewer layers wants these alone.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from atom_core.checkpoint import EMBEDDING, HEAD, Checkpoint, is_another_head
from atom_core.layers.parameters import MissingLayer, ParameterLayer, Placement, checkpoint_module
from atom_core.mixers.cache_scales import SCALE_NAMES, CacheScales
from atom_core.models.decoder import CheckpointModel
from atom_core.spellings import respelled

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
    layer: ParameterLayer
    path: str
    """Of the layer in the model."""


@dataclass
class Mismatch:
    """What does not fit between a model and a checkpoint."""

    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    misshapen: list[str] = field(default_factory=list)

    def raise_if_any(
        self, architecture: str, what: str, advice: str = "Check that config.json belongs to these weights."
    ) -> None:
        """Raise a ValueError that lists everything, if there is anything; ``what`` "does" or "do" not fit."""
        kinds = (("missing", self.missing), ("unexpected", self.unexpected), ("misshapen", self.misshapen))
        found = [
            f"{kind} ({len(names)}): {', '.join(sorted(names)[:_LISTED])}{', ...' if len(names) > _LISTED else ''}"
            for kind, names in kinds
            if names
        ]
        if found:
            raise ValueError(f"{what} not fit {architecture}: {'; '.join(found)}. {advice}")


def expected_tensors(model: CheckpointModel) -> dict[str, Slot]:
    """Every tensor that ``model`` wants from a checkpoint, by its name there."""
    slots: dict[str, Slot] = {}
    for path, module in model.named_modules():
        if isinstance(module, ParameterLayer) and path not in model.borrowed:
            slots.update(slots_of(path, module))
    return slots


def slots_of(path: str, layer: ParameterLayer) -> Iterator[tuple[str, Slot]]:
    """Those of the layer at ``path``, as its parameters are now."""
    for relative, name, placement in layer.placements():
        parameter = f"{path}.{placement.held_by or name}"
        yield f"{checkpoint_module(path, relative)}.{name}", Slot(parameter, placement, layer, path)


class Writer:
    """Writes checkpoint tensors into the layers of a model, each of which it opens when its first tensor comes.

    Args:
        slots: of the model.
        whole: the layers of which every tensor will come; None: all of them.
    """

    def __init__(self, slots: Mapping[str, Slot], whole: Container[ParameterLayer] | None = None) -> None:
        self.slots, self.whole = slots, whole
        self._opened: dict[ParameterLayer, dict[str, Slot]] = {}

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Copy this rank's part of a tensor that has a slot, and no problem with it.

        Raises:
            ValueError: it holds numbers that cannot be what it is; the message goes on from the name.
        """
        layer = self.slots[name].layer
        if layer not in self._opened:
            layer.open_weights(self.whole is None or layer in self.whole)
            self._opened[layer] = dict(slots_of(self.slots[name].path, layer))
        self._opened[layer][name].placement.load(tensor)


def cache_scales(model: CheckpointModel) -> dict[str, CacheScales]:
    """Every name under which a checkpoint may have scales of a layer's cache, and the layer's."""
    return {
        f"{path.rpartition('.')[0]}.{name}": module
        for path, module in model.named_modules()
        if isinstance(module, CacheScales)
        for name in SCALE_NAMES
    }


def others_tensors(model: CheckpointModel) -> tuple[str, ...]:
    """Prefixes of tensors that other ranks load alone."""
    prefixes: list[str] = []
    for path, module in model.named_modules():
        if isinstance(module, MissingLayer) or path in model.borrowed:
            prefixes.append(f"{path}.")
        elif isinstance(module, ParameterLayer):
            prefixes += (f"{checkpoint_module(path, relative)}." for relative in module.elsewhere())
    return tuple(prefixes)


def load_weights(
    model: CheckpointModel, tensors: Iterable[tuple[str, torch.Tensor]], checkpoint: str = "given"
) -> set[str]:
    """Copy ``tensors`` into the parameters of ``model``, whose layers are open afterwards.

    Layers behind the model's are left unread, and noted in it.

    Args:
        model: built; what its parameters hold is written over.
        tensors: (checkpoint name, tensor); each is whole, this rank's part is cut here.
        checkpoint: what an error calls them.

    Returns:
        The names of all parameters that were loaded.

    Raises:
        ValueError: tensors are missing, unexpected, misshapen, or of a dtype that the model cannot have; or
            a scale of an FP8 cache is not one.
    """
    slots = expected_tensors(model)
    elsewhere = others_tensors(model)
    scales = cache_scales(model)
    found: dict[CacheScales, dict[str, torch.Tensor]] = {}
    waiting, mismatch, writer = set(slots), Mismatch(), Writer(slots)
    head = TiedHead(model)
    strangers: set[str] = set()
    for name, tensor in respelled(model.config, slots, tensors):
        head.look_at(name, tensor)
        if name in scales:
            found.setdefault(scales[name], {})[name] = tensor
            continue
        slot = slots.get(name)
        if slot is None:
            strangers.add(name)
            continue
        if name not in waiting:
            mismatch.unexpected.append(f"{name} once more")
            continue
        waiting.discard(name)
        if problem := slot.placement.problem(tuple(tensor.shape), dtype_name(tensor)):
            mismatch.misshapen.append(f"{name} {problem}")
            continue
        try:
            writer.write(name, tensor)
        except ValueError as error:
            mismatch.misshapen.append(f"{name} {error}")
    mismatch.missing = sorted(waiting)
    model.unread = layers_behind(model, strangers)
    mismatch.unexpected += [name for name in strangers if not ignored(model, name, elsewhere)]
    mismatch.raise_if_any(model.config.architecture, f"The checkpoint {checkpoint} does")
    for layer, of_layer in found.items():
        layer.adopt(of_layer)
    return {slot.parameter_name for slot in slots.values()}


class TiedHead:
    """Whether a model whose embedding is its head is given another head, which would be left out without a word."""

    def __init__(self, model: CheckpointModel) -> None:
        self._of = (HEAD, EMBEDDING) if model.config.tie_word_embeddings else ()
        self._found: dict[str, torch.Tensor] = {}

    def look_at(self, name: str, tensor: torch.Tensor) -> None:
        """Of each tensor that comes.

        Raises:
            ValueError: the head's numbers are not the embedding's.
        """
        if name not in self._of:
            return
        self._found[name] = tensor
        if len(self._found) < len(self._of):
            return
        head, embedding = (self._found.pop(name) for name in self._of)
        if is_another_head(head, embedding):
            raise ValueError(
                f"The files have {HEAD} with other numbers than {EMBEDDING}, and config.json says "
                "tie_word_embeddings=true. Set it to false, or take the tensor out."
            )


def check_checkpoint(model: CheckpointModel, checkpoint: Checkpoint) -> None:
    """Compare the files' headers with what ``model`` (best built on the meta device) wants; nothing is loaded.

    Layers behind the model's are noted in it.

    Raises:
        ValueError: as :func:`load_weights`, with the file of each tensor.
    """
    slots = expected_tensors(model)
    elsewhere, scales = others_tensors(model), cache_scales(model)
    tensors = dict(respelled(model.config, slots, checkpoint.tensors.items()))
    model.unread = layers_behind(model, tensors)
    mismatch = Mismatch(missing=sorted(set(slots) - set(tensors)))
    for name, info in tensors.items():
        slot = slots.get(name)
        if slot is None:
            if name not in scales and not ignored(model, name, elsewhere):
                mismatch.unexpected.append(f"{name} in {info.file.name}")
        elif problem := slot.placement.problem(info.shape, info.dtype):
            mismatch.misshapen.append(f"{name} in {info.file.name} {problem}")
    mismatch.raise_if_any(model.config.architecture, f"The checkpoint {Path(checkpoint.directory)} does")


def layers_behind(model: CheckpointModel, names: Collection[str]) -> range:
    """The indices of the layers that a checkpoint with tensors of these names has behind the model's, in a row.

    A layer has a norm in front, as the model's have: a tensor that is called as of a later layer and stands alone is
    no layer. Layers that draft are where the configuration says, and not among them.
    """
    config = model.config
    first = end = config.layers_before + config.num_layers
    while f"model.layers.{end}.input_layernorm.weight" in names:
        end += 1
    only_drafts = end - first <= config.draft_layers and f"model.layers.{first}.enorm.weight" in names
    return range(first, first if only_drafts else end)


def unread_layers(model: CheckpointModel, checkpoint: str) -> str | None:
    """The one line that says which layers of a checkpoint were left unread; None: none were."""
    if not model.unread:
        return None
    first, last = model.unread[0], model.unread[-1]
    which = f"layer {first} is" if first == last else f"layers {first} to {last} are"
    return f"num_hidden_layers={model.config.num_layers}: of {checkpoint}, {which} left unread"


def ignored(model: CheckpointModel, name: str, elsewhere: tuple[str, ...]) -> bool:
    """Whether a tensor without a slot is none of this rank's business; ``elsewhere`` is :func:`others_tensors`."""
    unread = (f"model.layers.{index}." for index in model.unread)
    return name.endswith(model.ignored_suffixes) or name.startswith((*model.ignored_prefixes, *elsewhere, *unread))


def dtype_name(tensor: torch.Tensor) -> str:
    """As safetensors spells it."""
    return _DTYPES.get(tensor.dtype, str(tensor.dtype).removeprefix("torch."))
