"""The product by aiter: its quantiser of groups, then a kernel that reads the weight in an order of its own.

See :mod:`atom_core.kernels.fp8_linear.aiter_kernel` for gfx942's form of e4m3.
"""

from __future__ import annotations

import torch

from atom_core.kernels.aiter_library import aiter_function, require
from atom_core.kernels.fp8_linear.aiter_kernel import ShuffledWeight
from atom_core.kernels.opaque import opaque
from atom_core.kernels.select import Target
from atom_core.quant.fp8 import BLOCK_SIZE


class AiterFp8BlockLinear:
    """See :class:`atom_core.kernels.fp8_block_linear.Fp8BlockLinearKernel`."""

    def __init__(self, target: Target) -> None:
        require("aiter.per_group_quant_hip", "aiter.gemm_a8w8_blockscale_bpreshuffle")
        self.shuffled = ShuffledWeight(target)

    def adopt(self, weight: torch.Tensor, weight_scale: torch.Tensor) -> None:
        """Move the weight's bytes."""
        self.shuffled.adopt(weight, weight_scale.data)

    def __call__(
        self, x: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """``x [T, K]`` to ``[T, N]``; ``weight_scale`` is the layer's, of which this keeps its own."""
        y: torch.Tensor = _fp8_block_linear(x.contiguous(), *self.shuffled(weight))
        return y if bias is None else y.add_(bias)


@opaque("aiter_fp8_block_linear", lambda x, weight, scale: x.new_empty(x.shape[0], weight.shape[0]))
def _fp8_block_linear(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    if not len(x):
        return x.new_empty(0, weight.shape[0])
    # The product wants the scales of a group side by side: the result reads [T, G], and its bytes are [G, T].
    quantized, scales = aiter_function("aiter.per_group_quant_hip")(
        x, quant_dtype=weight.dtype, group_size=BLOCK_SIZE, transpose_scale=True
    )
    y: torch.Tensor = aiter_function("aiter.gemm_a8w8_blockscale_bpreshuffle")(
        quantized, weight, scales, scale, dtype=x.dtype
    )
    return y
