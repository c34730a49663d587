"""Norm layers."""

from __future__ import annotations

import torch

from atom_core.kernels.rms_norm import RMS_NORM, RmsNormSpec
from atom_core.layers.parameters import ParameterLayer, empty_parameter
from atom_core.runtime import Runtime


class RMSNorm(ParameterLayer):
    """Root mean square norm."""

    def __init__(self, size: int, eps: float, runtime: Runtime) -> None:
        super().__init__()
        self.weight = empty_parameter(runtime, size)
        self.eps = eps
        self.spec = RmsNormSpec(size, runtime.dtype)
        self.kernel = runtime.kernels.select(RMS_NORM, self.spec)

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """``norm(x + residual)`` and the sum, both ``[T, N]``; the inputs stay as they are."""
        if residual is None:
            return self.kernel(x, self.weight, self.eps, None)[0], x
        normed, summed = self.kernel(x, self.weight, self.eps, residual.clone())
        assert summed is not None
        return normed, summed


class HeadNorm(ParameterLayer):
    """The weight of a norm over each head of q or k, which the attention op applies before rope."""

    def __init__(self, head_dim: int, eps: float, runtime: Runtime) -> None:
        super().__init__()
        self.weight = empty_parameter(runtime, head_dim)
        self.eps = eps
