"""Alternative checkpoint names of a model's tensors, written by wrappers and newer libraries.

- The language part of a multimodal model has a prefix (``language_model.``, ``model.language_model.``), as vLLM, SGLang
  and Transformers write it.
- Transformers 5 and Qwen3.5 stack a layer's experts in one tensor per matrix: ``experts.gate_up_proj``
  ``[experts, 2 * intermediate, hidden]``, gates before ups, and ``experts.down_proj``
  ``[experts, hidden, intermediate]``. FP8 scales lie likewise, with ``_scale_inv`` or ``_scale`` behind the name. They
  are split where a family's checkpoints have one tensor per expert.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

import torch

from atom_core.checkpoint import TensorInfo
from atom_core.config import ModelConfig, MoEConfig
from atom_core.language_model import alone

if TYPE_CHECKING:
    from atom_core.weights import Slot

_STACK = re.compile(r"(.+)\.[^.]+\.experts\.(gate_up_proj|down_proj)(|_scale|_scale_inv)")

TensorT = TypeVar("TensorT", torch.Tensor, TensorInfo)


def respelled(
    config: ModelConfig, slots: Mapping[str, Slot], tensors: Iterable[tuple[str, TensorT]]
) -> Iterator[tuple[str, TensorT]]:
    """``tensors`` under the names of :func:`atom_core.weights.expected_tensors`; others keep their names.

    Args:
        config: the model's.
        slots: the model's, by the names that it knows.
        tensors: (name, tensor), or (name, the tensor's header entry).
    """
    for name, tensor in tensors:
        if name not in slots:
            name = alone(name)
        stack = None if name in slots else ExpertStack.of(config, name)
        if stack is None or stack.problem(tuple(tensor.shape), slots):
            yield name, tensor
        else:
            yield from _split(stack, tensor)


@dataclass(frozen=True)
class ExpertStack:
    """A checkpoint tensor with one matrix of all routed experts of a layer, or its scales."""

    moe: MoEConfig
    layer: str
    """The layer's module."""
    matrices: tuple[str, ...]
    """The checkpoint names of the matrices that lie behind each other in an expert's rows."""
    tensor: str
    """The name of an expert's tensor, where each has its own."""

    @classmethod
    def of(cls, config: ModelConfig, name: str) -> ExpertStack | None:
        """The tensor ``name``; None: it is another, or the model's checkpoints always have such stacks."""
        mixtures = [layer.moe for layer in config.layers if layer.moe is not None and not layer.moe.fused]
        if not mixtures or (found := _STACK.fullmatch(name)) is None:
            return None
        layer, matrix, suffix = found.groups()
        names = mixtures[0].names
        matrices = (names.down,) if matrix == "down_proj" else (names.gate, names.up)
        return cls(mixtures[0], layer, matrices, f"weight{suffix}")

    def problem(self, shape: tuple[int, ...], slots: Mapping[str, Slot]) -> str | None:
        """What is wrong with its ``shape`` for the experts among ``slots``; None: it can be split."""
        experts, matrices = self.moe.routing.num_experts, len(self.matrices)
        fits = len(shape) == 3 and shape[0] == experts and shape[1] % matrices == 0
        first = next((name for name in self.names() if name in slots), None)
        if first is None:
            return None if fits else f"is {list(shape)}, should have three dimensions, the first of {experts} experts"
        placement = slots[first].placement
        if fits and placement.problem((shape[1] // matrices, shape[2]), placement.dtypes[0]) is None:
            return None
        rows, *columns = placement.shape
        return f"is {list(shape)}, should be {[experts, matrices * rows, *(columns or [1])]}"

    def name_of(self, expert: int, matrix: str) -> str:
        """The name of an expert's tensor, where each has its own."""
        return f"{self.layer}.{self.moe.names.module}.experts.{expert}.{matrix}.{self.tensor}"

    def names(self) -> Iterator[str]:
        """The names of all experts' tensors."""
        for expert in range(self.moe.routing.num_experts):
            for matrix in self.matrices:
                yield self.name_of(expert, matrix)


def _split(stack: ExpertStack, tensor: TensorT) -> Iterator[tuple[str, TensorT]]:
    """One tensor per matrix and expert."""
    rows_of, rows = _row_slicer(tensor), tensor.shape[1] // len(stack.matrices)
    for expert in range(tensor.shape[0]):
        for index, matrix in enumerate(stack.matrices):
            yield stack.name_of(expert, matrix), rows_of(expert, index * rows, (index + 1) * rows)


def _row_slicer(tensor: TensorT) -> Callable[[int, int, int], TensorT]:
    """A function of (expert, first row, end row) that slices a tensor or a header entry."""
    if isinstance(tensor, TensorInfo):
        info = tensor
        return lambda expert, first, end: replace(info, shape=(end - first, info.shape[2]))
    return lambda expert, first, end: tensor[expert, first:end]
