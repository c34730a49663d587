"""Checkpoint names of a layer's parameters, and this rank's shard of each checkpoint tensor.

Each layer lists one :class:`Placement` for each of its checkpoint tensors. So loading (:mod:`atom_core.weights`) needs
no knowledge of layers, and model files rename no tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from atom_core.runtime import Runtime

#: The dtypes of unquantised tensors, as safetensors spells them.
FLOATS = ("F64", "F32", "F16", "BF16")


@dataclass(frozen=True)
class Placement:
    """Copies ``count`` rows along ``dim`` of a checkpoint tensor, from row ``source``, to row ``target`` on."""

    #: The dtypes that the checkpoint tensor may have.
    dtypes: ClassVar[tuple[str, ...]] = FLOATS

    parameter: torch.Tensor
    """The parameter that is written to, or a view of it."""
    shape: tuple[int, ...]
    """The full tensor's shape in the checkpoint."""
    dim: int = 0
    source: int = 0
    target: int = 0
    count: int | None = None
    """None: all of them."""
    padding: int = 0
    """Rows of zeros after the copied ones, which the checkpoint does not have."""
    parameter_name: str = ""
    """The parameter's name in its module; empty: the tensor's name."""

    def problem(self, shape: tuple[int, ...], dtype: str) -> str | None:
        """What is wrong with a tensor of ``shape`` and ``dtype``; None: it fits."""
        if shape != self.shape:
            return f"is {list(shape)}, should be {list(self.shape)}"
        return self.dtype_problem(dtype)

    def dtype_problem(self, dtype: str) -> str | None:
        """As :meth:`problem`, for the dtype alone."""
        return None if dtype in self.dtypes else f"is stored as {dtype}, but config.json names no quantisation of it"

    def check(self, tensor: torch.Tensor) -> None:
        """Check the values of a ``tensor`` that has no :meth:`problem`; nothing is written.

        Raises:
            ValueError: invalid values; the message continues after the tensor's name.
        """

    def load(self, tensor: torch.Tensor) -> None:
        """Copy this rank's shard of a ``tensor`` that has no :meth:`problem`.

        Raises:
            ValueError: as :meth:`check`.
        """
        count = self.shape[self.dim] if self.count is None else self.count
        with torch.no_grad():
            mine = tensor.narrow(self.dim, self.source, count)
            self.parameter.narrow(self.dim, self.target, count).copy_(mine)
            if self.padding:
                self.parameter.narrow(self.dim, self.target + count, self.padding).zero_()

    def store(self, out: torch.Tensor) -> None:
        """The reverse of :meth:`load`: copy this rank's shard to ``out``, which has the full tensor's shape."""
        count = self.shape[self.dim] if self.count is None else self.count
        out.narrow(self.dim, self.source, count).copy_(self.parameter.narrow(self.dim, self.target, count))


@dataclass(frozen=True, kw_only=True)
class SeveralPlacements(Placement):
    """A checkpoint tensor of which several parts are copied."""

    each: tuple[Placement, ...]

    @property
    def dtypes(self) -> tuple[str, ...]:  # type: ignore[override]
        """See :class:`Placement`."""
        return self.each[0].dtypes

    def problem(self, shape: tuple[int, ...], dtype: str) -> str | None:
        """See :class:`Placement`; they all expect the same tensor."""
        return self.each[0].problem(shape, dtype)

    def check(self, tensor: torch.Tensor) -> None:
        """See :class:`Placement`."""
        for placement in self.each:
            placement.check(tensor)

    def load(self, tensor: torch.Tensor) -> None:
        """See :class:`Placement`."""
        for placement in self.each:
            placement.load(tensor)

    def store(self, out: torch.Tensor) -> None:
        """See :class:`Placement`."""
        for placement in self.each:
            placement.store(out)


def one_a_tensor(placements: Iterable[tuple[str, str, Placement]]) -> Iterator[tuple[str, str, Placement]]:
    """Merge ``placements``, as of :meth:`ParameterLayer.placements`, that belong to the same tensor."""
    found: dict[tuple[str, str], list[Placement]] = {}
    for module, name, placement in placements:
        found.setdefault((module, name), []).append(placement)
    for (module, name), each in found.items():
        first = each[0]
        if len(each) > 1:
            first = SeveralPlacements(
                parameter=first.parameter, shape=first.shape, parameter_name=first.parameter_name, each=tuple(each)
            )
        yield module, name, first


class ParameterLayer(nn.Module):
    """A module with parameters that knows their checkpoint names.

    The defaults fit a module whose parameters are unsharded and stored under their own names.

    Open weights have the checkpoint's form, closed weights the kernels' form. A module is built open. An update opens
    it, writes, and closes it.
    """

    closed = False

    def open_weights(self, whole: bool) -> None:
        """Bring the parameters into the checkpoint's form; earlier placements become invalid.

        Args:
            whole: every tensor of the layer will be written, so the current values need not be restored.
        """
        if self.closed:
            self.restore_weights(whole)
            self.closed = False

    def close_weights(self) -> None:
        """Bring open weights into the kernels' form, at the same addresses as before."""
        if not self.closed:
            self.finalize_weights()
            self.closed = True

    def as_loaded(self) -> dict[str, torch.Tensor]:
        """Copies of the parameters on the CPU, in the checkpoint's form, by their names in this module."""
        closed = self.closed
        self.open_weights(whole=False)
        copies = {name: it.detach().to("cpu", copy=True) for name, it in self.named_parameters(recurse=False)}
        if closed:
            self.close_weights()
        return copies

    @property
    def changes_form(self) -> bool:
        """Whether the kernels' form of the weights may differ from the checkpoint's."""
        return type(self).finalize_weights is not ParameterLayer.finalize_weights

    def placements(self) -> Iterator[tuple[str, str, Placement]]:
        """(checkpoint module, tensor name, placement) of each tensor; "" is this module, "../name" a sibling."""
        for name, parameter in self.named_parameters(recurse=False):
            yield "", name, Placement(parameter, tuple(parameter.shape))

    def other_ranks_modules(self) -> Iterator[str]:
        """Checkpoint modules, as in :meth:`placements`, whose tensors only other ranks load."""
        yield from ()

    def finalize_weights(self) -> None:
        """Convert the weights to the kernel's form, over that of earlier weights."""

    def restore_weights(self, whole: bool) -> None:
        """Undo :meth:`finalize_weights`; see :meth:`open_weights`."""


def empty_parameter(runtime: Runtime, *shape: int) -> nn.Parameter:
    """An uninitialised parameter in the model's dtype on its device."""
    return nn.Parameter(torch.empty(shape, dtype=runtime.dtype, device=runtime.device), requires_grad=False)


class MissingLayer(nn.Module):
    """A layer of another pipeline stage, which loads the checkpoint tensors under its name."""


def checkpoint_module(path: str, relative: str) -> str:
    """The checkpoint name of module ``relative`` to ``path``; see :meth:`ParameterLayer.placements`."""
    if not relative:
        return path
    while relative.startswith("../"):
        path, relative = path.rpartition(".")[0], relative.removeprefix("../")
    return f"{path}.{relative}"


def share(total: int, rank: int, world_size: int, what: str, ranks: str = "tensor parallel size") -> range:
    """This rank's range of ``total`` items, which divide equally over the ranks.

    Raises:
        ValueError: they do not divide; the message calls the items ``what`` and the number of ranks ``ranks``.
    """
    if total % world_size:
        raise ValueError(
            f"{ranks} {world_size} does not divide {what}={total}; "
            f"use one of {[size for size in range(1, total + 1) if total % size == 0][:8]}."
        )
    each = total // world_size
    return range(rank * each, (rank + 1) * each)
