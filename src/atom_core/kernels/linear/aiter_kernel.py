"""The product by aiter, which looks up the fastest kernel of several libraries for its shape."""

from __future__ import annotations

import torch

from atom_core.kernels.aiter_library import LooksUpTokens, aiter_function, require
from atom_core.kernels.custom_op import custom_op


class AiterLinear(LooksUpTokens):
    """See :class:`atom_core.kernels.linear.LinearKernel`."""

    def __init__(self) -> None:
        require("aiter.tuned_gemm.gemm_a16w16")

    def adopt(self, weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
        """Weights stay as they are."""
        return False

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """``x W^T + b``."""
        y: torch.Tensor = _linear(x, weight, bias)
        return y


class AiterFloat32Linear(LooksUpTokens):
    """The same with a result in float32: few rows by our Triton kernels, more by hipBLASLt.

    ``gemm_a16w16`` takes a dtype for the result, but some of its kernels round to the input's dtype first.
    """

    def __init__(self) -> None:
        require("aiter.tuned_gemm.hipb_gemm")

    def adopt(self, weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
        """Weights stay as they are."""
        return False

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """``x W^T`` in float32."""
        assert bias is None
        y: torch.Tensor = _float32_linear(x, weight)
        return y


@custom_op("aiter_linear", lambda x, weight, bias: x.new_empty(x.shape[0], weight.shape[0]))
def _linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    if not len(x):
        return x.new_empty(0, weight.shape[0])
    y: torch.Tensor = aiter_function("aiter.tuned_gemm.gemm_a16w16")(x, weight, bias=bias)
    return y


def _float32_result(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x.new_empty(x.shape[0], weight.shape[0], dtype=torch.float32)


@custom_op("aiter_float32_linear", _float32_result)
def _float32_linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    if not len(x):
        return _float32_result(x, weight)
    from atom_core.kernels.linear.tiles import MAX_ROWS, chosen_tile  # needs triton, which a CPU may lack

    tile = chosen_tile(x, weight, nvidia=False) if len(x) <= MAX_ROWS else None
    if tile is not None:
        from atom_core.kernels.linear.triton_kernel import product

        return product(x, weight, None, tile=tile, overlap=False, dtype=torch.float32)
    # -1: hipBLASLt chooses its kernel for the shape.
    y: torch.Tensor = aiter_function("aiter.tuned_gemm.hipb_gemm")(x, weight, -1, otype=torch.float32)
    return y
