"""Other ways in which checkpoints spell the tensors of a model: what wrappers and newer libraries write.

- A model that is the language part of another has a prefix in front of its names (``language_model.``,
  ``model.language_model.``), as vLLM, SGLang and Transformers write it.
- Transformers 5 keeps all experts of a layer in one tensor a matrix: ``experts.gate_up_proj``
  ``[experts, 2 * intermediate, hidden]``, gates before ups, and ``experts.down_proj``
  ``[experts, hidden, intermediate]``; families whose checkpoints have one tensor an expert are given these.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import replace
from typing import TypeVar

import torch

from atom_core.checkpoint import TensorInfo
from atom_core.config import ModelConfig

_PREFIXES = (("model.language_model.", "model."), ("language_model.", ""))
_GATE_UP, _DOWN = ".experts.gate_up_proj", ".experts.down_proj"

TensorT = TypeVar("TensorT", torch.Tensor, TensorInfo)


def respelled(
    config: ModelConfig, expected: Collection[str], tensors: Iterable[tuple[str, TensorT]]
) -> Iterator[tuple[str, TensorT]]:
    """``tensors`` under the names of :func:`atom_core.weights.expected_tensors`; what has no other spelling as it is.

    Args:
        config: the model's.
        expected: the names that it knows.
        tensors: (name, tensor), or (name, what a header says of it).
    """
    for name, tensor in tensors:
        if name not in expected:
            for prefix, instead in _PREFIXES:
                if name.startswith(prefix):
                    name = instead + name.removeprefix(prefix)
                    break
        if name not in expected and name.endswith((_GATE_UP, _DOWN)) and len(tensor.shape) == 3:
            yield from _experts_of(config, name, tensor)
        else:
            yield name, tensor


def _experts_of(config: ModelConfig, name: str, tensor: TensorT) -> Iterator[tuple[str, TensorT]]:
    """One tensor a matrix and expert; the tensor itself where the layer has no such experts."""
    mixtures = [layer.moe for layer in config.layers if layer.moe is not None and not layer.moe.fused]
    if not mixtures:
        yield name, tensor
        return
    names = mixtures[0].names
    count, rows = tensor.shape[0], tensor.shape[1]
    layer = name.removesuffix(_GATE_UP if name.endswith(_GATE_UP) else _DOWN).rpartition(".")[0]
    parts: list[tuple[str, int, int]] = [(names.down, 0, rows)]
    if name.endswith(_GATE_UP):
        parts = [(names.gate, 0, rows // 2), (names.up, rows // 2, rows)]
    cut = _cut_of(tensor)
    for expert in range(count):
        for matrix, first, end in parts:
            yield f"{layer}.{names.module}.experts.{expert}.{matrix}.weight", cut(expert, first, end)


def _cut_of(tensor: TensorT) -> Callable[[int, int, int], TensorT]:
    """What gives some rows of an expert of a tensor, or what a header would say of them."""
    if isinstance(tensor, TensorInfo):
        info = tensor
        return lambda expert, first, end: replace(info, shape=(end - first, info.shape[2]))
    return lambda expert, first, end: tensor[expert, first:end]
