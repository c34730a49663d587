"""The product by aiter, which looks up the fastest of several libraries' kernels for its shape."""

from __future__ import annotations

import torch

from atom_core.kernels.aiter_library import aiter_function, require
from atom_core.kernels.opaque import opaque


class AiterLinear:
    """See :class:`atom_core.kernels.linear.LinearKernel`; reads the layer's weight as it is."""

    def __init__(self) -> None:
        require("aiter.tuned_gemm.gemm_a16w16")

    def adopt(self, weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
        """Nothing to keep."""
        return False

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """``x W^T + b``."""
        y: torch.Tensor = _linear(x, weight, bias)
        return y


@opaque("aiter_linear", lambda x, weight, bias: x.new_empty(x.shape[0], weight.shape[0]))
def _linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    if not len(x):
        return x.new_empty(0, weight.shape[0])
    y: torch.Tensor = aiter_function("aiter.tuned_gemm.gemm_a16w16")(x, weight, bias=bias)
    return y
