"""The product as torch computes it: the vendor's GEMM on a GPU, torch's own on a CPU."""

from __future__ import annotations

import torch
import torch.nn.functional as F


class TorchLinear:
    """See :class:`atom_core.kernels.linear.LinearKernel`; reads the layer's weight as it is."""

    def adopt(self, weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
        """Nothing to keep."""
        return False

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """``x W^T + b``."""
        return F.linear(x, weight, bias)
