"""Alternative checkpoint names of a model's tensors, written by wrappers and newer libraries.

- The language part of a multimodal model has a prefix (``language_model.``, ``model.language_model.``), as vLLM, SGLang
  and Transformers write it.
- Transformers 5 stacks a layer's experts in one tensor per matrix: ``experts.gate_up_proj``
  ``[experts, 2 * intermediate, hidden]``, gates before ups, and ``experts.down_proj``
  ``[experts, hidden, intermediate]``. They are split where a family's checkpoints have one tensor per expert.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import replace
from typing import TypeVar

import torch

from atom_core.checkpoint import TensorInfo
from atom_core.config import ModelConfig
from atom_core.language_model import alone

_GATE_UP, _DOWN = ".experts.gate_up_proj", ".experts.down_proj"

TensorT = TypeVar("TensorT", torch.Tensor, TensorInfo)


def respelled(
    config: ModelConfig, expected: Collection[str], tensors: Iterable[tuple[str, TensorT]]
) -> Iterator[tuple[str, TensorT]]:
    """``tensors`` under the names of :func:`atom_core.weights.expected_tensors`; others keep their names.

    Args:
        config: the model's.
        expected: the names that the model knows.
        tensors: (name, tensor), or (name, the tensor's header entry).
    """
    for name, tensor in tensors:
        if name not in expected:
            name = alone(name)
        if name not in expected and name.endswith((_GATE_UP, _DOWN)) and len(tensor.shape) == 3:
            yield from _experts_of(config, name, tensor)
        else:
            yield name, tensor


def _experts_of(config: ModelConfig, name: str, tensor: TensorT) -> Iterator[tuple[str, TensorT]]:
    """One tensor per matrix and expert; the tensor itself if the model has no unfused experts."""
    mixtures = [layer.moe for layer in config.layers if layer.moe is not None and not layer.moe.fused]
    if not mixtures:
        yield name, tensor
        return
    names = mixtures[0].names
    count, rows = tensor.shape[0], tensor.shape[1]
    layer = name.removesuffix(_GATE_UP if name.endswith(_GATE_UP) else _DOWN).rpartition(".")[0]
    matrices: list[tuple[str, int, int]] = [(names.down, 0, rows)]
    if name.endswith(_GATE_UP):
        matrices = [(names.gate, 0, rows // 2), (names.up, rows // 2, rows)]
    rows_of = _row_slicer(tensor)
    for expert in range(count):
        for matrix, first, end in matrices:
            yield f"{layer}.{names.module}.experts.{expert}.{matrix}.weight", rows_of(expert, first, end)


def _row_slicer(tensor: TensorT) -> Callable[[int, int, int], TensorT]:
    """A function of (expert, first row, end row) that slices a tensor or a header entry."""
    if isinstance(tensor, TensorInfo):
        info = tensor
        return lambda expert, first, end: replace(info, shape=(end - first, info.shape[2]))
    return lambda expert, first, end: tensor[expert, first:end]
