"""The product as it is defined, in float32; and group quantisation to FP8."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from atom_core.kernels.fp8_linear.reference import row_scales, to_e4m3
from atom_core.quant.fp8 import BLOCK_SIZE


def quantize_groups(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``x [T, K]`` in e4m3, and the scales of its groups, float32 ``[T, ceil(K / 128)]``."""
    rows, size = x.shape
    groups = -(-size // BLOCK_SIZE)
    # Zeros fill up the last group, which does not change its largest magnitude.
    grouped = F.pad(x, (0, groups * BLOCK_SIZE - size)).view(rows, groups, BLOCK_SIZE)
    scale = row_scales(grouped)
    quantized = to_e4m3(grouped, scale).view(rows, groups * BLOCK_SIZE)
    return quantized[:, :size], scale[:, :, 0]


def block_product(
    x: torch.Tensor, x_scale: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor
) -> torch.Tensor:
    """The double sum of :mod:`atom_core.kernels.fp8_block_linear`, one group after the other, float32 ``[T, N]``.

    Args:
        x: e4m3 ``[T, K]``.
        x_scale: float32 ``[T, ceil(K / 128)]``.
        weight: e4m3 ``[N, K]``.
        weight_scale: float32 ``[ceil(N / 128), ceil(K / 128)]``.
    """
    row_scale = weight_scale.repeat_interleave(BLOCK_SIZE, 0)[: len(weight)]
    y = torch.zeros(len(x), len(weight), dtype=torch.float32, device=x.device)
    for group, begin in enumerate(range(0, x.shape[1], BLOCK_SIZE)):
        here = slice(begin, begin + BLOCK_SIZE)
        partial = x[:, here].float() @ weight[:, here].float().T
        y += partial * x_scale[:, group, None] * row_scale[:, group]
    return y


class ReferenceFp8BlockLinear:
    """See :mod:`atom_core.kernels.fp8_block_linear`. Each call converts the whole weight, a group at a time."""

    def adopt(self, weight: torch.Tensor, weight_scale: torch.Tensor) -> None:
        """Weights stay as they are."""

    def __call__(
        self, x: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """``x [T, K]`` to ``[T, N]``."""
        y = block_product(*quantize_groups(x), weight, weight_scale)
        if bias is not None:
            y = y + bias.float()
        return y.to(x.dtype)
