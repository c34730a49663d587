"""A matrix product for each head: ``y[t, h] = x[t, h, :K] W[h]``, with the rest of ``x`` copied.

``x``: ``[T, H, K + C]``; ``W``: ``[H, K, N]``; ``out``: ``[T, H, N + C]``, written: products, then ``x[t, h, K:]``. All
have one dtype and any strides, except that the last dimension of ``x`` and ``out``, and one of the last two of ``W``,
are contiguous.

MLA absorbs the two halves of its up-projection into queries and outputs by it; the rotary part of queries is copied.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from atom_core.kernels.head_linear.reference import head_linear, widened_head_linear
from atom_core.kernels.linear.widened import why_not_widened
from atom_core.kernels.select import Implementation, Op, Target, always
from atom_core.kernels.triton_support import overlaps, why_no_triton


@dataclass(frozen=True)
class HeadLinearSpec:
    """One product: ``in_features`` is K, ``out_features`` N, for ``num_heads`` heads of this rank."""

    num_heads: int
    in_features: int
    out_features: int
    dtype: torch.dtype


class HeadLinearKernel(Protocol):
    """Writes ``out``."""

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None: ...


def _triton_supports(spec: HeadLinearSpec, target: Target) -> str | None:
    return why_no_triton(target)


def _build_triton(spec: HeadLinearSpec, target: Target) -> HeadLinearKernel:
    from atom_core.kernels.head_linear.triton_kernel import TritonHeadLinear  # needs triton, which a CPU may lack

    return TritonHeadLinear(spec, overlaps(target))


HEAD_LINEAR: Op[HeadLinearSpec, HeadLinearKernel] = Op(
    "head_linear",
    (
        Implementation("triton", _triton_supports, _build_triton),
        Implementation(
            "widened",
            lambda spec, target: why_not_widened(spec.dtype, target),
            lambda spec, target: widened_head_linear,
        ),
        Implementation("reference", always, lambda spec, target: head_linear),
    ),
)
