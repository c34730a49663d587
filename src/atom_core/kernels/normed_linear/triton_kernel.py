"""A norm and a product of few rows in Triton: one launch where the product's kernel can apply the norm, else more."""

from __future__ import annotations

import torch

from atom_core.kernels.fp8_block_linear import triton_kernel as in_blocks
from atom_core.kernels.fp8_linear.triton_kernel import multiply_few
from atom_core.kernels.gated_activation.triton_kernel import gated_activation
from atom_core.kernels.linear.tiles import MAX_ROWS, MOST_ROWS, chosen_tile
from atom_core.kernels.linear.triton_kernel import Norm, many_rows, product
from atom_core.kernels.mxfp4_linear import triton_kernel as in_mxfp4
from atom_core.kernels.normed_linear import Operands
from atom_core.kernels.rms_norm.triton_kernel import rms_norm
from atom_core.types import Activation


class TritonNormedLinear:
    """See :mod:`atom_core.kernels.normed_linear`.

    Args:
        activation: after the product.
        nvidia: whether the device is NVIDIA's; others have less shared memory.
        overlap: see :func:`atom_core.kernels.triton_support.overlaps`.
        quantized: whether the weight is quantised.
    """

    def __init__(self, activation: Activation | None, nvidia: bool, overlap: bool, quantized: bool = False) -> None:
        self.activation, self.nvidia, self.overlap = activation, nvidia, overlap
        self.max_rows = MAX_ROWS if quantized else MOST_ROWS

    def __call__(self, x: torch.Tensor, norm: torch.Tensor, eps: float, layer: Operands) -> torch.Tensor:
        """See :class:`atom_core.kernels.normed_linear.NormedLinearKernel`."""
        given: Norm | None = Norm(norm, eps)
        if layer.scale is not None and layer.scale.dtype == torch.uint8:
            return in_mxfp4.multiply_few(
                x,
                layer.weight,
                layer.scale,
                layer.bias,
                rounded_inputs=layer.rounded_inputs,
                nvidia=self.nvidia,
                overlap=self.overlap,
                norm=given,
                activation=self.activation,
            )
        if layer.scale is not None and layer.scale.dim() == 2:
            return in_blocks.multiply_few(
                x,
                layer.weight,
                layer.scale,
                layer.bias,
                nvidia=self.nvidia,
                overlap=self.overlap,
                norm=given,
                activation=self.activation,
            )
        if layer.scale is not None:
            return multiply_few(
                x,
                layer.weight,
                layer.scale,
                layer.input_scale,
                layer.bias,
                nvidia=self.nvidia,
                overlap=self.overlap,
                norm=given,
                activation=self.activation,
            )
        tile = chosen_tile(x, layer.weight, self.nvidia)
        if tile is None or not tile.norms:
            x, given = rms_norm(x, norm, eps, None, overlap=self.overlap)[0], None
        if tile is None:
            y = many_rows(x, layer.weight, layer.bias, layer.float32_result, self.nvidia)
            return y if self.activation is None else gated_activation(y, self.activation, self.overlap)
        return product(
            x,
            layer.weight,
            layer.bias,
            tile=tile,
            overlap=self.overlap,
            norm=given,
            activation=self.activation,
            dtype=torch.float32 if layer.float32_result else None,
        )
