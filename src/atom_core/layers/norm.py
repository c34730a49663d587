"""Norm layers."""

from __future__ import annotations

import torch

from atom_core.kernels.rms_norm import RMS_NORM, RmsNormSpec
from atom_core.layers.parameters import ParameterLayer, empty_parameter
from atom_core.runtime import Runtime


class RMSNorm(ParameterLayer):
    """Root mean square norm; with a residual, of ``x + residual``, which is returned beside it."""

    def __init__(self, size: int, eps: float, runtime: Runtime) -> None:
        super().__init__()
        self.weight = empty_parameter(runtime, size)
        self.eps = eps
        self.kernel = runtime.kernels.select(RMS_NORM, RmsNormSpec(size, runtime.dtype))

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """``x``, ``residual`` ``[T, N]`` to (normed, new residual); without a residual, ``x`` becomes it."""
        normed, summed = self.kernel(x, self.weight, self.eps, residual)
        return normed, x if summed is None else summed


class HeadNorm(ParameterLayer):
    """The weight of a norm over each head of q or k; the attention op applies it, together with rope."""

    def __init__(self, head_dim: int, eps: float, runtime: Runtime) -> None:
        super().__init__()
        self.weight = empty_parameter(runtime, head_dim)
        self.eps = eps
