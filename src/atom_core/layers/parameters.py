"""How a layer's parameters are named in checkpoints, and which part of a checkpoint tensor is this rank's.

A :class:`Placement` says it for one checkpoint tensor; each layer lists its own, so that loading
(:mod:`atom_core.weights`) knows no layer and a model file has no name surgery.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from atom_core.runtime import Runtime

#: The dtypes of numbers that are stored as they are, as safetensors spells them.
FLOATS = ("F64", "F32", "F16", "BF16")


@dataclass(frozen=True)
class Placement:
    """Where a checkpoint tensor goes: along ``dim``, ``count`` rows from ``source`` on to those from ``target`` on."""

    #: What it may be stored as.
    dtypes: ClassVar[tuple[str, ...]] = FLOATS

    parameter: torch.Tensor
    """What is written to: a parameter, or a part of one."""
    shape: tuple[int, ...]
    """The whole tensor's shape in the checkpoint."""
    dim: int = 0
    source: int = 0
    target: int = 0
    count: int | None = None
    """None: all of them."""
    padding: int = 0
    """Rows of zeros behind them, which the checkpoint does not have."""
    held_by: str = ""
    """The module's parameter that this is a part of, where it is not called as the tensor is."""

    def problem(self, shape: tuple[int, ...], dtype: str) -> str | None:
        """None where a tensor of ``shape`` and ``dtype`` is what goes here, else what is wrong with it."""
        if shape != self.shape:
            return f"is {list(shape)}, should be {list(self.shape)}"
        return self.dtype_problem(dtype)

    def dtype_problem(self, dtype: str) -> str | None:
        """The same of the dtype alone."""
        return None if dtype in self.dtypes else f"is stored as {dtype}, but config.json names no quantisation of it"

    def check(self, tensor: torch.Tensor) -> None:
        """Look at the numbers of ``tensor``, with which there is no :meth:`problem`; nothing is written.

        Raises:
            ValueError: it holds numbers that cannot be what it is; the message goes on from the tensor's name.
        """

    def load(self, tensor: torch.Tensor) -> None:
        """Copy this rank's part of ``tensor``, with which there is no :meth:`problem`.

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
        """The way back: copy this rank's part to ``out``, of the whole tensor's shape; the rest stays as it is."""
        count = self.shape[self.dim] if self.count is None else self.count
        out.narrow(self.dim, self.source, count).copy_(self.parameter.narrow(self.dim, self.target, count))


class ParameterLayer(nn.Module):
    """A module that holds parameters and knows their checkpoint names.

    The default fits a module whose parameters are stored whole under their own names.

    Its weights are open, when parameters hold what checkpoints have, or closed, when kernels have them in the form that
    they read. A module is built open. Weights that come later go the same way: open, write, close.
    """

    closed = False

    def open_weights(self, whole: bool) -> None:
        """Make the parameters what placements write to; placements from before are not to be used any more.

        Args:
            whole: every tensor of the layer will be written, so what is there need not be kept.
        """
        if self.closed:
            self.restore_weights(whole)
            self.closed = False

    def close_weights(self) -> None:
        """Hand the weights to the kernels, where they are open; forms that kernels made before stay where they are."""
        if not self.closed:
            self.finalize_weights()
            self.closed = True

    def as_loaded(self) -> dict[str, torch.Tensor]:
        """The parameters by their names in this module, in the form in which they are loaded: copies on the CPU."""
        closed = self.closed
        self.open_weights(whole=False)
        copies = {name: it.detach().to("cpu", copy=True) for name, it in self.named_parameters(recurse=False)}
        if closed:
            self.close_weights()
        return copies

    @property
    def changes_form(self) -> bool:
        """Whether kernels may have the weights in a form of their own."""
        return type(self).finalize_weights is not ParameterLayer.finalize_weights

    def placements(self) -> Iterator[tuple[str, str, Placement]]:
        """(checkpoint module, tensor name, placement) of each tensor; "" is this module, "../name" one beside it."""
        for name, parameter in self.named_parameters(recurse=False):
            yield "", name, Placement(parameter, tuple(parameter.shape))

    def elsewhere(self) -> Iterator[str]:
        """Checkpoint modules, as in :meth:`placements`, whose tensors are other ranks' alone."""
        yield from ()

    def finalize_weights(self) -> None:
        """Bring loaded weights into the form that the kernel reads; what it made of earlier ones is written over."""

    def restore_weights(self, whole: bool) -> None:
        """Undo :meth:`finalize_weights`; see :meth:`open_weights`."""


def empty_parameter(runtime: Runtime, *shape: int) -> nn.Parameter:
    """A parameter in the model's dtype on its device, to be loaded."""
    return nn.Parameter(torch.empty(shape, dtype=runtime.dtype, device=runtime.device), requires_grad=False)


class MissingLayer(nn.Module):
    """A layer that another pipeline stage holds; checkpoint tensors under its name are not this rank's."""


def checkpoint_module(path: str, relative: str) -> str:
    """What checkpoints call a part of the module at ``path``; see :meth:`ParameterLayer.placements`."""
    if not relative:
        return path
    while relative.startswith("../"):
        path, relative = path.rpartition(".")[0], relative.removeprefix("../")
    return f"{path}.{relative}"


def share(total: int, rank: int, world_size: int, what: str, ranks: str = "tensor parallel size") -> range:
    """This rank's equal share of ``total`` things.

    Raises:
        ValueError: they do not divide; ``what`` names them for the user, ``ranks`` what says how many ranks there are.
    """
    if total % world_size:
        raise ValueError(
            f"{ranks} {world_size} does not divide {what}={total}; "
            f"use one of {[size for size in range(1, total + 1) if total % size == 0][:8]}."
        )
    each = total // world_size
    return range(rank * each, (rank + 1) * each)
