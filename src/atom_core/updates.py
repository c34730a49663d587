"""Updates of the weights of a loaded model, in place.

An update has all tensors of the model or some of them, in one call or in several. Each call first checks the names,
shapes, dtypes and scales of its tensors, so a refused call changes nothing. After each call every layer is in the
kernels' form again, at the addresses that captured graphs use.

An update that fails after tensors were written leaves a mix of old and new weights. The model then refuses to run until
the missing tensors have arrived.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field

import torch

from atom_core.checkpoint import Checkpoint
from atom_core.language_model import alone
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
    layers_beyond,
    load_weights,
    other_ranks_tensors,
    slots_of,
)

#: Ends the error of a refused update.
UNCHANGED = "Nothing was overwritten: the model keeps the weights that it has."
#: Ends the error of an update that had begun.
NOT_SERVED = "No request is served until a whole update has arrived."
_LISTED = 8
#: Bytes of tensors that an iterator's batch may hold in memory.
_BATCH_BYTES = 2**30


class IncompleteWeights(RuntimeError):
    """The model cannot run: its weights are a mix of two sets."""


@dataclass
class _Call:
    """The tensors of one call to :meth:`ModelWeights.update`."""

    source: str
    slots: Mapping[str, Slot]
    expected: Set[str]
    """Names of all tensors of the call that have a slot."""
    remaining: Counter[ParameterLayer] = field(init=False)
    """The number of tensors that have not arrived, by layer."""
    whole: Set[ParameterLayer] = field(init=False)
    """The layers whose tensors are all in the call."""
    arrived: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.remaining = Counter(self.slots[name].layer for name in self.expected)
        sizes = Counter(slot.layer for slot in self.slots.values())
        self.whole = {layer for layer, count in self.remaining.items() if count == sizes[layer]}


class ModelWeights:
    """The weights of one model: loaded once with :meth:`load`, then updated while it serves.

    Args:
        model: this rank's.
        full_model: builds the unsharded model on the meta device. Ranks with different layers or experts check tensors
            against it, so that either all of them refuse an update or none does.
    """

    def __init__(self, model: CheckpointModel, full_model: Callable[[], CheckpointModel] | None = None) -> None:
        self.model = model
        self._full_model = functools.cache(full_model or (lambda: model))
        self._loaded = False
        self._missing: set[str] = set()
        self._why = ""
        self._device = next(model.parameters()).device
        #: The tensors that have arrived since :meth:`begin`; None outside a session.
        self._session: set[str] | None = None

    @property
    def loaded(self) -> bool:
        """Whether the kernels have weights."""
        return self._loaded

    @property
    def complete(self) -> bool:
        """Whether no tensor is missing."""
        return not self._missing

    def load(self, tensors: Iterable[tuple[str, torch.Tensor]], source: str) -> set[str]:
        """Load the first weights, see :func:`atom_core.weights.load_weights`; :meth:`close` must follow."""
        return load_weights(self.model, tensors, source)

    def close(self) -> None:
        """Convert the loaded or dummy weights to the kernels' form."""
        for module in self.model.modules():
            if isinstance(module, ParameterLayer):
                module.close_weights()
        self._loaded = True

    def begin(self) -> None:
        """Begin an update in several calls; without effect within one."""
        if self._session is None:
            self._session = set()

    def end(self) -> None:
        """End the update that :meth:`begin` began."""
        self._session = None

    def check_ready(self) -> None:
        """Refuse to run a model whose weights are incomplete.

        Raises:
            IncompleteWeights: an update has not ended, or tensors are missing.
        """
        if self._session:
            expected = set(expected_tensors(self.model))
            raise IncompleteWeights(
                f"The weights are being updated: {len(self._session)} of {len(expected)} tensors have arrived, and the "
                f"update has not ended. Not arrived: {_listed(expected - self._session)}. Pause requests while weights "
                f"are sent. {self._why if self._missing else ''}".rstrip()
            )
        if self._missing:
            raise IncompleteWeights(
                f"The weights are incomplete: {self._why} Until {len(self._missing)} more have arrived, no request is "
                f"served: {_listed(self._missing)}."
            )

    def update(
        self, tensors: Iterable[tuple[str, torch.Tensor]], source: str, *, whole: bool, checked: bool = False
    ) -> set[str]:
        """Overwrite the weights of a loaded model with ``tensors``.

        Args:
            tensors: (checkpoint name, full tensor); each rank copies its own shard.
            source: where they come from, for errors.
            whole: whether all tensors of the model must be there; else those left out stay as they are.
            checked: :func:`check_update` has checked their files, so each is written as it is read. Otherwise a list
                is checked before any tensor is written, and an iterator in batches of a GiB.

        Returns:
            The names of the parameters that were written to.

        Raises:
            ValueError: tensors do not fit, and nothing was written; or the update failed after some were written, and
                the model refuses to run until the others arrive.
        """
        assert whole or not checked
        slots = expected_tensors(self.model)
        is_iterator = not isinstance(tensors, (list, tuple))
        tensors = respelled(self.model.config, slots, tensors)
        if not checked:
            if is_iterator:
                return self._update_in_batches(tensors, source, whole)
            tensors = list(tensors)
            self._check(tensors, source, whole)
        names = set(slots) if checked else {name for name, _ in tensors} & set(slots)
        call = _Call(source, slots, names)
        try:
            self._write(tensors, call)
        except Exception as error:
            self._missing |= call.expected - call.arrived
            self._why = f"an update from {source} broke off ({error})."
            raise ValueError(
                f"The update from {source} broke off after {len(call.arrived)} of {len(call.expected)} tensors: "
                f"{error}. {NOT_SERVED}"
            ) from error
        return {slots[name].parameter_name for name in call.arrived}

    def _update_in_batches(self, tensors: Iterable[tuple[str, torch.Tensor]], source: str, whole: bool) -> set[str]:
        """Update from an iterator: a list of all its tensors would be a second model in the device's memory."""
        own_session, written = self._session is None, set[str]()
        self.begin()
        assert self._session is not None
        try:
            for batch in _batches(tensors):
                written |= self.update(batch, source, whole=False)
            missing = set(expected_tensors(self.model)) - self._session
            if whole and missing:
                raise ValueError(f"{len(missing)} tensors did not come, {min(missing)} among them")
        except Exception as error:
            if not self._session:
                raise
            self._mark_missing(f"an update from {source} broke off ({error}).")
            raise ValueError(f"The update from {source} broke off: {error}. {NOT_SERVED}") from error
        finally:
            if own_session:
                self.end()
        return written

    def _mark_missing(self, why: str) -> None:
        """Of an update that failed after some tensors were written, mark all others as missing."""
        self._missing |= set(expected_tensors(self.model)) - (self._session or set())
        self._why = why

    def read(self, name: str) -> torch.Tensor | None:
        """A tensor by its checkpoint name, in full shape and float32, NaN outside this rank's shard.

        Weights that were quantised on loading are dequantised. None: the model does not have the tensor.
        """
        name = alone(name)
        slot = expected_tensors(self.model).get(name)
        if slot is None:
            whole = expected_tensors(self._full_model()).get(name)
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
        """Refuse tensors that do not fit; if earlier calls have written, the model's other tensors become missing."""
        try:
            full_model = self._full_model()
            full_model.unread = self.model.unread
            check_tensors(full_model, tensors, source, whole)
            self.model.unread = full_model.unread
            _check_cache_scales(self.model, tensors, source)
        except ValueError as error:
            if not self._session:
                raise ValueError(f"{error} {UNCHANGED}") from error
            self._mark_missing(f"a part of an update was refused, from {source}, after others were written.")
            raise ValueError(f"{error} {NOT_SERVED}") from error

    def _write(self, tensors: Iterable[tuple[str, torch.Tensor]], call: _Call) -> None:
        scale_layers = cache_scales(self.model)
        other_ranks, writer = other_ranks_tensors(self.model), Writer(call.slots, call.whole)
        for name, tensor in tensors:
            if name not in call.slots:
                if name not in scale_layers and not ignored(self.model, name, other_ranks):
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
            self._missing.discard(name)
            if self._session is not None:
                self._session.add(name)
            call.remaining[layer] -= 1
            if not call.remaining[layer]:
                layer.close_weights()
        if missing := call.expected - call.arrived:
            raise ValueError(f"{len(missing)} tensors did not come, {min(missing)} among them")


def _listed(names: Set[str]) -> str:
    first = sorted(names)[:_LISTED]
    return ", ".join(first) + (", ..." if len(names) > _LISTED else "") or "none"


def _batches(tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[list[tuple[str, torch.Tensor]]]:
    batch: list[tuple[str, torch.Tensor]] = []
    size = 0
    for name, tensor in tensors:
        batch.append((name, tensor))
        size += tensor.nbytes
        if size >= _BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def check_tensors(
    model: CheckpointModel, tensors: Collection[tuple[str, torch.Tensor]], source: str, whole: bool
) -> None:
    """Check tensors before they are written; ``model`` may be on the meta device.

    Sets ``model.unread`` as :func:`atom_core.weights.load_weights` does.

    Raises:
        ValueError: tensors are unexpected, of the wrong shape or dtype, or have invalid values; or ``whole`` and some
            are missing.
    """
    slots, scale_layers, other_ranks = expected_tensors(model), cache_scales(model), other_ranks_tensors(model)
    model.unread = max(model.unread, layers_beyond(model, {name for name, _ in tensors}), key=len)
    mismatch, absent, unknown = Mismatch(), set(slots), dict[str, tuple[int, ...]]()
    for name, tensor in tensors:
        absent.discard(name)
        if name not in slots:
            if name not in scale_layers and not ignored(model, name, other_ranks):
                unknown[name] = tuple(tensor.shape)
        elif problem := slots[name].placement.problem(tuple(tensor.shape), dtype_name(tensor)):
            mismatch.misshapen.append(f"{name} {problem}")
        else:
            try:
                slots[name].placement.check(tensor)
            except ValueError as error:
                mismatch.misshapen.append(f"{name} {error}")
    if whole:
        mismatch.missing = sorted(absent)
    for name, shape in unknown.items():
        mismatch.add_unknown(model.config, slots, name, shape)
    advice = "An update has the names, shapes and dtypes of the checkpoint that is served."
    mismatch.raise_if_any(model.config.architecture, f"The weights of {source} do", advice)


def check_stored_scales(model: CheckpointModel, checkpoint: Checkpoint) -> None:
    """Check the values of a checkpoint's scales, the only tensors that are read; headers were checked before.

    Raises:
        ValueError: a scale is invalid, or a cache's scale is not the one in use.
    """
    slots, scale_layers = expected_tensors(model), cache_scales(model)
    of_caches: list[tuple[str, torch.Tensor]] = []
    for stored, whole in checkpoint.read(name for name in checkpoint.tensors if "scale" in name):
        for name, tensor in respelled(model.config, slots, [(stored, whole)]):
            if name in scale_layers:
                of_caches.append((name, tensor))
            elif name in slots:
                try:
                    slots[name].placement.check(tensor)
                except ValueError as error:
                    raise ValueError(f"{stored} in {checkpoint.tensors[stored].file} {error}.") from error
    _check_cache_scales(model, of_caches, str(checkpoint.directory))


def _check_cache_scales(model: CheckpointModel, tensors: Iterable[tuple[str, torch.Tensor]], source: str) -> None:
    scale_layers = cache_scales(model)
    given: dict[CacheScales, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors:
        if name in scale_layers:
            given.setdefault(scale_layers[name], {})[name] = tensor
    for layer, scales in given.items():
        if change := layer.change(scales):
            raise ValueError(
                f"The weights of {source} cannot be loaded while serving: {change}. Restart the server with them."
            )
