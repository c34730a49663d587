"""A norm and a product of few rows in Triton: one launch where the product's kernel can norm, else two."""

from __future__ import annotations

import torch

from atom_core.config import Activation
from atom_core.kernels.linear.triton_kernel import MAX_ROWS, Norm, chosen_tile, product
from atom_core.kernels.rms_norm.triton_kernel import rms_norm


class TritonNormedLinear:
    """See :mod:`atom_core.kernels.normed_linear`.

    Args:
        activation: behind the product.
        nvidia: whether the device is one of NVIDIA's; others have less shared memory.
        overlap: see :func:`atom_core.kernels.triton_support.overlaps`.
    """

    max_rows = MAX_ROWS

    def __init__(self, activation: Activation | None, nvidia: bool, overlap: bool) -> None:
        self.activation, self.nvidia, self.overlap = activation, nvidia, overlap

    def __call__(
        self,
        x: torch.Tensor,
        norm: torch.Tensor,
        eps: float,
        weight: torch.Tensor,
        scales: torch.Tensor | None,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        """See :class:`atom_core.kernels.normed_linear.NormedLinearKernel`."""
        tile = chosen_tile(x, weight, self.nvidia)
        given: Norm | None = Norm(norm, eps)
        if not tile.norms:
            x, given = rms_norm(x, norm, eps, None, overlap=self.overlap)[0], None
        return product(
            x,
            weight,
            bias,
            tile=tile,
            overlap=self.overlap,
            scales=scales,
            norm=given,
            activation=self.activation,
        )
