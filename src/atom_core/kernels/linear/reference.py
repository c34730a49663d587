"""The product by torch: the vendor's GEMM on a GPU, torch's own on a CPU."""

from __future__ import annotations

import torch
import torch.nn.functional as F


class TorchLinear:
    """See :class:`atom_core.kernels.linear.LinearKernel`; ``float32_result``: the result is in float32."""

    def __init__(self, float32_result: bool = False) -> None:
        self.float32_result = float32_result

    def adopt(self, weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
        """Weights stay as they are."""
        return False

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """``x W^T + b``."""
        return linear(x, weight, bias, True) if self.float32_result else F.linear(x, weight, bias)


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, float32_result: bool) -> torch.Tensor:
    """``x W^T + b``, in float32 or in the inputs' dtype."""
    if float32_result:
        x, weight, bias = x.float(), weight.float(), None if bias is None else bias.float()
    return F.linear(x, weight, bias)
