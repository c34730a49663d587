"""The sum with a shared expert's output, which is scaled by its gate: ``x + sigmoid(gate) * y``.

``x``, ``y``: ``[T, H]``; ``gate``: ``[T, 1]``, a column of the router's logits. In float32, rounded once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from atom_core.kernels.gated_sum.reference import gated_sum
from atom_core.kernels.select import Implementation, Op, Target, always
from atom_core.kernels.triton_support import overlaps, why_no_triton


@dataclass(frozen=True)
class GatedSumSpec:
    """The width ``H`` and the dtype of ``x`` and ``y``."""

    size: int
    dtype: torch.dtype


GatedSumKernel = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def _triton_supports(spec: GatedSumSpec, target: Target) -> str | None:
    return why_no_triton(target)


def _build_triton(spec: GatedSumSpec, target: Target) -> GatedSumKernel:
    from atom_core.kernels.gated_sum.triton_kernel import gated_sum as launch  # needs triton, which a CPU may lack

    return partial(launch, overlap=overlaps(target))


GATED_SUM: Op[GatedSumSpec, GatedSumKernel] = Op(
    "gated_sum",
    (
        Implementation("triton", _triton_supports, _build_triton),
        Implementation("reference", always, lambda spec, target: gated_sum),
    ),
)
