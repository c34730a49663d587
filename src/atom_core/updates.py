"""New weights for a model that has been loaded, where the old ones are.

An update may be whole, or of some tensors, in one call or in several. What can be seen of a call before anything is
written is looked at first: names, shapes, dtypes, and numbers that cannot be scales. So a call that is refused has
changed nothing. Each call leaves every layer in the form that kernels read, at the addresses that graphs have captured.

Where calls before have written, or tensors are read while they are written, a model may be left between two sets of
weights. Then it may not be run until the tensors that it lacks have arrived.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field

import torch

from atom_core.checkpoint import Checkpoint
from atom_core.layers.parameters import ParameterLayer
from atom_core.mixers.cache_scales import CacheScales
from atom_core.models.decoder import CheckpointModel
from atom_core.spellings import respelled
from atom_core.weights import (
    Mismatch,
    Slot,
    Writer,
    cache_scales,
    dtype_name,
    expected_tensors,
    ignored,
    layers_behind,
    load_weights,
    others_tensors,
    slots_of,
)

#: Of a refused update.
UNCHANGED = "Nothing was overwritten: the model keeps the weights that it has."
#: Of one that had begun.
NOT_SERVED = "No request is served until a whole update has arrived."
_LISTED = 8
#: Bytes of tensors that are kept at once where they come one by one.
_LOT = 2**30


class IncompleteWeights(RuntimeError):
    """A model was to run between two sets of weights."""


@dataclass
class _Call:
    """What one call brings to a model."""

    source: str
    slots: Mapping[str, Slot]
    coming: Set[str]
    """Names of all tensors that have a slot and will come."""
    left: Counter[ParameterLayer] = field(init=False)
    """How many of them are still to come, by layer."""
    whole: Set[ParameterLayer] = field(init=False)
    """The layers of which all tensors come."""
    arrived: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.left = Counter(self.slots[name].layer for name in self.coming)
        sizes = Counter(slot.layer for slot in self.slots.values())
        self.whole = {layer for layer, count in self.left.items() if count == sizes[layer]}


class ModelWeights:
    """The weights of one model: loaded once, and updated while it serves.

    Args:
        model: built. Whoever hands over a whole set the first time calls :meth:`load`.
        layout: makes the whole model of one rank, without memory. Where ranks hold different layers or experts, each
            looks at tensors by it, so that all of them refuse an update or none does.
    """

    def __init__(self, model: CheckpointModel, layout: Callable[[], CheckpointModel] | None = None) -> None:
        self.model = model
        self._layout = functools.cache(layout or (lambda: model))
        self._loaded = False
        self._awaited: set[str] = set()
        self._why = ""
        self._device = next(model.parameters()).device
        #: Between :meth:`begin` and :meth:`end`: what has arrived since.
        self._session: set[str] | None = None

    @property
    def loaded(self) -> bool:
        """Whether kernels have had weights."""
        return self._loaded

    @property
    def complete(self) -> bool:
        """Whether no tensor is missing."""
        return not self._awaited

    def load(self, tensors: Iterable[tuple[str, torch.Tensor]], source: str) -> set[str]:
        """The first weights, whole; see :func:`atom_core.weights.load_weights`. :meth:`close` is still to be called."""
        return load_weights(self.model, tensors, source)

    def close(self) -> None:
        """Hand what was loaded, or made up, to the kernels."""
        for module in self.model.modules():
            if isinstance(module, ParameterLayer):
                module.close_weights()
        self._loaded = True

    def begin(self) -> None:
        """Several calls follow that belong together; without effect where they have begun."""
        if self._session is None:
            self._session = set()

    def end(self) -> None:
        """They were all."""
        self._session = None

    def check_ready(self) -> None:
        """Whether the model may be run.

        Raises:
            IncompleteWeights: it may not.
        """
        if self._session:
            expected = set(expected_tensors(self.model))
            raise IncompleteWeights(
                f"The weights are being updated: {len(self._session)} of {len(expected)} tensors have arrived, and the "
                f"update has not ended. Not arrived: {_listed(expected - self._session)}. Pause requests while weights "
                f"are sent. {self._why if self._awaited else ''}".rstrip()
            )
        if self._awaited:
            raise IncompleteWeights(
                f"The weights are incomplete: {self._why} Until {len(self._awaited)} more have arrived, no request is "
                f"served: {_listed(self._awaited)}."
            )

    def update(
        self, tensors: Iterable[tuple[str, torch.Tensor]], source: str, *, whole: bool, seen: bool = False
    ) -> set[str]:
        """Write ``tensors`` over the weights of a loaded model.

        Args:
            tensors: (checkpoint name, tensor), each of them whole; this rank's part is cut here.
            source: where they come from, for errors: a folder, or words.
            whole: they must be all tensors of the model; else any may be left out, and stays as it is.
            seen: :func:`check_update` has looked at what they will be, and they are written as they are read. Else a
                list is looked at before the first is written, and what comes one by one in lots of a GiB.

        Returns:
            The names of the parameters that were written to.

        Raises:
            ValueError: they do not fit, and nothing was written; or, where they are written as they are read, one
                could not be read or holds numbers that cannot be what it is, and the model waits for the rest.
        """
        assert whole or not seen
        as_they_come = not isinstance(tensors, (list, tuple))
        tensors = respelled(self.model.config, expected_tensors(self.model), tensors)
        tensors = tensors if as_they_come else list(tensors)
        if not seen:
            if not isinstance(tensors, (list, tuple)):
                return self._update_by_lots(tensors, source, whole)
            self._check(tensors, source, whole)
        slots = expected_tensors(self.model)
        names = set(slots) if seen else {name for name, _ in tensors} & set(slots)
        call = _Call(source, slots, names)
        try:
            self._write(tensors, call)
        except Exception as error:
            self._awaited |= call.coming - call.arrived
            self._why = f"an update from {source} broke off ({error})."
            raise ValueError(
                f"The update from {source} broke off after {len(call.arrived)} of {len(call.coming)} tensors: {error}. "
                f"{NOT_SERVED}"
            ) from error
        return {slots[name].parameter_name for name in call.arrived}

    def _update_by_lots(self, tensors: Iterable[tuple[str, torch.Tensor]], source: str, whole: bool) -> set[str]:
        """What comes one by one, and may be made as it comes: to keep it all would be a second model on the device."""
        alone, written = self._session is None, set[str]()
        self.begin()
        assert self._session is not None
        try:
            for lot in _lots(tensors):
                written |= self.update(lot, source, whole=False)
            missing = set(expected_tensors(self.model)) - self._session
            if whole and missing:
                raise ValueError(f"{len(missing)} tensors did not come, {min(missing)} among them")
        except Exception as error:
            if not self._session:
                raise
            self._await_rest(f"an update from {source} broke off ({error}).")
            raise ValueError(f"The update from {source} broke off: {error}. {NOT_SERVED}") from error
        finally:
            if alone:
                self.end()
        return written

    def _await_rest(self, why: str) -> None:
        """After some tensors of several calls have been written, all others are missing."""
        self._awaited |= set(expected_tensors(self.model)) - (self._session or set())
        self._why = why

    def read(self, name: str) -> torch.Tensor | None:
        """This rank's part of a tensor as checkpoints name it, in float32; NaN where another rank has the rest, or all.

        What was quantised on loading is scaled back. None: the model has no such tensor.
        """
        slot = expected_tensors(self.model).get(name)
        if slot is None:
            whole = expected_tensors(self._layout()).get(name)
            return None if whole is None else torch.full(whole.placement.shape, float("nan"), device=self._device)
        layer, closed = slot.layer, slot.layer.closed
        layer.open_weights(whole=False)
        placement = dict(slots_of(slot.path, layer))[name].placement
        out = torch.full(placement.shape, float("nan"), device=placement.parameter.device)
        placement.store(out)
        if closed:
            layer.close_weights()
        return out

    def _check(self, tensors: Collection[tuple[str, torch.Tensor]], source: str, whole: bool) -> None:
        """Refuse what does not fit; where calls before have written, the model waits for what it would have been."""
        try:
            layout = self._layout()
            layout.unread = self.model.unread
            check_tensors(layout, tensors, source, whole)
            self.model.unread = layout.unread
            _check_cache_scales(self.model, tensors, source)
        except ValueError as error:
            if not self._session:
                raise ValueError(f"{error} {UNCHANGED}") from error
            self._await_rest(f"a part of an update was refused, from {source}, after others were written.")
            raise ValueError(f"{error} {NOT_SERVED}") from error

    def _write(self, tensors: Iterable[tuple[str, torch.Tensor]], call: _Call) -> None:
        of_caches = cache_scales(self.model)
        elsewhere, writer = others_tensors(self.model), Writer(call.slots, call.whole)
        for name, tensor in tensors:
            if name not in call.slots:
                if name not in of_caches and not ignored(self.model, name, elsewhere):
                    raise ValueError(f"{name} is no tensor of {self.model.config.architecture}")
                continue
            layer, placement = call.slots[name].layer, call.slots[name].placement
            if problem := placement.problem(tuple(tensor.shape), dtype_name(tensor)):
                raise ValueError(f"{name} {problem}")
            try:
                writer.write(name, tensor)
            except ValueError as error:
                raise ValueError(f"{name} {error}") from error
            if name in call.arrived:
                continue
            call.arrived.add(name)
            self._awaited.discard(name)
            if self._session is not None:
                self._session.add(name)
            call.left[layer] -= 1
            if not call.left[layer]:
                layer.close_weights()
        if missing := call.coming - call.arrived:
            raise ValueError(f"{len(missing)} tensors did not come, {min(missing)} among them")


def _listed(names: Set[str]) -> str:
    first = sorted(names)[:_LISTED]
    return ", ".join(first) + (", ..." if len(names) > _LISTED else "") or "none"


def _lots(tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[list[tuple[str, torch.Tensor]]]:
    lot: list[tuple[str, torch.Tensor]] = []
    size = 0
    for name, tensor in tensors:
        lot.append((name, tensor))
        size += tensor.nbytes
        if size >= _LOT:
            yield lot
            lot, size = [], 0
    if lot:
        yield lot


def check_tensors(
    model: CheckpointModel, tensors: Collection[tuple[str, torch.Tensor]], source: str, whole: bool
) -> None:
    """Look at tensors that are to be written to ``model``, which may be without memory.

    Layers behind the model's are noted in it.

    Raises:
        ValueError: some are unexpected, misshapen, of a dtype that the model cannot have or of numbers that cannot be
            what they are; or, where ``whole``, some are missing.
    """
    slots, of_caches, elsewhere = expected_tensors(model), cache_scales(model), others_tensors(model)
    model.unread = max(model.unread, layers_behind(model, {name for name, _ in tensors}), key=len)
    mismatch, absent = Mismatch(), set(slots)
    for name, tensor in tensors:
        absent.discard(name)
        if name not in slots:
            if name not in of_caches and not ignored(model, name, elsewhere):
                mismatch.unexpected.append(name)
        elif problem := slots[name].placement.problem(tuple(tensor.shape), dtype_name(tensor)):
            mismatch.misshapen.append(f"{name} {problem}")
        else:
            try:
                slots[name].placement.check(tensor)
            except ValueError as error:
                mismatch.misshapen.append(f"{name} {error}")
    if whole:
        mismatch.missing = sorted(absent)
    advice = "An update has the names, shapes and dtypes of the checkpoint that is served."
    mismatch.raise_if_any(model.config.architecture, f"The weights of {source} do", advice)


def check_stored_scales(model: CheckpointModel, checkpoint: Checkpoint) -> None:
    """Whether the scales in a checkpoint are what they can be, and those of a cache the ones in use.

    The files' headers have been compared with the model before; of tensors these alone are read, which are small.

    Raises:
        ValueError: they are not.
    """
    slots, of_caches = expected_tensors(model), cache_scales(model)
    for name, tensor in checkpoint.read(name for name in checkpoint.tensors if name in slots and "scale" in name):
        try:
            slots[name].placement.check(tensor)
        except ValueError as error:
            raise ValueError(f"{name} in {checkpoint.tensors[name].file} {error}.") from error
    stored = checkpoint.read(name for name in checkpoint.tensors if name in of_caches)
    _check_cache_scales(model, stored, str(checkpoint.directory))


def _check_cache_scales(model: CheckpointModel, tensors: Iterable[tuple[str, torch.Tensor]], source: str) -> None:
    of_caches = cache_scales(model)
    given: dict[CacheScales, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors:
        if name in of_caches:
            given.setdefault(of_caches[name], {})[name] = tensor
    for layer, of_layer in given.items():
        if change := layer.change(of_layer):
            raise ValueError(f"The weights of {source} cannot be taken while serving: {change}. Start anew from them.")
