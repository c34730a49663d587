"""The product by aiter: its group quantisation, then a product with a preshuffled weight.

See :mod:`atom_core.kernels.fp8_linear.aiter_kernel` for gfx942's variant of e4m3.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from atom_core.kernels.aiter_library import LooksUpTokens, aiter_function, require
from atom_core.kernels.custom_op import custom_op
from atom_core.kernels.fp8_inputs import InputForm, QuantizedInput
from atom_core.kernels.fp8_linear.aiter_kernel import ShuffledWeight, of_product
from atom_core.kernels.select import Target
from atom_core.quant.fp8 import BLOCK_SIZE

if TYPE_CHECKING:
    from atom_core.kernels.fp8_block_linear import Fp8BlockLinearSpec


class AiterFp8BlockLinear(LooksUpTokens):
    """See :class:`atom_core.kernels.fp8_block_linear.Fp8BlockLinearKernel`.

    It is also a :class:`atom_core.kernels.fp8_inputs.QuantizedInputKernel`.
    """

    def __init__(self, spec: Fp8BlockLinearSpec, target: Target) -> None:
        require("aiter.per_group_quant_hip", "aiter.gemm_a8w8_blockscale_bpreshuffle")
        self.shuffled = ShuffledWeight(target)
        self.dtype, self.form = spec.dtype, InputForm(self.shuffled.dtype, group=BLOCK_SIZE)

    def adopt(self, weight: torch.Tensor, weight_scale: torch.Tensor) -> None:
        """Preshuffle the weight."""
        self.shuffled.adopt(weight, weight_scale.data)

    def move_back(self, *weights: torch.Tensor) -> None:
        """See :class:`atom_core.kernels.moved.MovingKernel`."""
        for weight in weights:
            self.shuffled.move_back(weight)

    def __call__(
        self, x: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """``x [T, K]`` to ``[T, N]``; the layer's ``weight_scale`` is not used."""
        y: torch.Tensor = _fp8_block_linear(x.contiguous(), *self.shuffled(weight))
        return y if bias is None else y.add_(bias)

    def takes_quantized(self, rows: int) -> bool:
        """Any number of rows."""
        return True

    def multiply(
        self, x: QuantizedInput, weight: torch.Tensor, weight_scale: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """See :class:`atom_core.kernels.fp8_inputs.QuantizedInputKernel`; ``weight_scale`` is as in a call."""
        y: torch.Tensor = _product(*x, *self.shuffled(weight), self.dtype)
        return y if bias is None else y.add_(bias)


@custom_op("aiter_fp8_block_linear", lambda x, weight, scale: x.new_empty(x.shape[0], weight.shape[0]))
def _fp8_block_linear(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    if not len(x):
        return x.new_empty(0, weight.shape[0])
    # The shape of the scales is [T, G], but their bytes are [G, T].
    quantized, scales = aiter_function("aiter.per_group_quant_hip")(
        x, quant_dtype=weight.dtype, group_size=BLOCK_SIZE, transpose_scale=True
    )
    product: torch.Tensor = _product(quantized, scales.view(-1, len(x)), weight, scale, x.dtype)
    return product


@custom_op("aiter_fp8_block_product", of_product)
def _product(
    x: torch.Tensor, x_scale: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    if not len(x):
        return of_product(x, x_scale, weight, scale, dtype)
    # It reads the scales transposed, but asks for the other shape.
    y: torch.Tensor = aiter_function("aiter.gemm_a8w8_blockscale_bpreshuffle")(
        x, weight, x_scale.view(len(x), -1), scale, dtype=dtype
    )
    return y
