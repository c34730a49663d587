"""Root mean square norm (arXiv 1910.07467), alone or with the residual added first.

    x = x + residual                     (where a residual is given; it is also returned)
    y = x / sqrt(mean(x^2) + eps) * weight

``x``, ``residual``: ``[T, N]`` of one dtype; ``weight``: ``[N]``. Sums are float32 and rounded once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from atom_core.kernels.rms_norm.cpu import rms_norm as rms_norm_on_cpu
from atom_core.kernels.rms_norm.reference import rms_norm
from atom_core.kernels.select import Implementation, Op, always, only_on_cpu


@dataclass(frozen=True)
class RmsNormSpec:
    """One norm: its width and dtype."""

    size: int
    dtype: torch.dtype


class RmsNormKernel(Protocol):
    """The call: ``(x, weight, eps, residual)`` to ``(y, new residual)``.

    Without a residual the second result is None. Inputs may be overwritten: callers use the results alone.
    """

    def __call__(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]: ...


RMS_NORM: Op[RmsNormSpec, RmsNormKernel] = Op(
    "rms_norm",
    (
        Implementation("torch", only_on_cpu, lambda spec, target: rms_norm_on_cpu),
        Implementation("reference", always, lambda spec, target: rms_norm),
    ),
)
