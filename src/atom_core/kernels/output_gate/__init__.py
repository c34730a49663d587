"""The output gate of attention: ``out = out * sigmoid(gate)``, in place, in float32 and rounded once.

``out``: ``[T, H, D]``, its rows together; ``gate``: ``[T, H * D]``, whose rows may be strided.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch

from atom_core.kernels.output_gate.reference import multiply_by_gate
from atom_core.kernels.select import Implementation, Op, Target, always
from atom_core.kernels.triton_support import overlaps, why_no_triton


@dataclass(frozen=True)
class OutputGateSpec:
    """One layer."""

    size: int
    """``H * D``."""


class OutputGateKernel(Protocol):
    """The call: ``(out, gate)``; ``out`` is written to."""

    def __call__(self, out: torch.Tensor, gate: torch.Tensor) -> None: ...


def _triton_supports(spec: OutputGateSpec, target: Target) -> str | None:
    return why_no_triton(target)


def _build_triton(spec: OutputGateSpec, target: Target) -> OutputGateKernel:
    from atom_core.kernels.output_gate.triton_kernel import multiply_by_gate as launch  # needs triton

    return partial(launch, overlap=overlaps(target))


OUTPUT_GATE: Op[OutputGateSpec, OutputGateKernel] = Op(
    "output_gate",
    (
        Implementation("triton", _triton_supports, _build_triton),
        Implementation("reference", always, lambda spec, target: multiply_by_gate),
    ),
)
