"""Token embedding over a slice of the vocabulary.

``ids``: ``[T]`` integers; ``weight``: rows ``first .. first + rows - 1`` of the table, ``[rows, N]``; result
``[T, N]``, with zeros for ids outside the slice: an all-reduce completes it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from atom_core.kernels.embedding.reference import embedding
from atom_core.kernels.select import Implementation, Op, Target, always
from atom_core.kernels.triton_support import why_no_triton


@dataclass(frozen=True)
class EmbeddingSpec:
    """One table: its width, dtype, and whether it is a slice of the vocabulary."""

    size: int
    dtype: torch.dtype
    sliced: bool


class EmbeddingKernel(Protocol):
    """The call: ``(ids, weight, first row)``; ``first`` is None if this rank has the whole vocabulary."""

    def __call__(self, ids: torch.Tensor, weight: torch.Tensor, first: int | None) -> torch.Tensor: ...


def _triton_supports(spec: EmbeddingSpec, target: Target) -> str | None:
    return why_no_triton(target)


def _build_triton(spec: EmbeddingSpec, target: Target) -> EmbeddingKernel:
    from atom_core.kernels.embedding.triton_kernel import embedding as launch  # needs triton, which a CPU may lack

    return launch


EMBEDDING: Op[EmbeddingSpec, EmbeddingKernel] = Op(
    "embedding",
    (
        Implementation("triton", _triton_supports, _build_triton),
        Implementation("reference", always, lambda spec, target: embedding),
    ),
)
