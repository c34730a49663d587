"""More than 64 rows by a weight in blocks through torch, whose cuBLAS supports group scales on Hopper.

On an H200 it takes 0.30 to 0.77 of the time of :mod:`.many_rows` for products of DeepSeek V3 with 72 to 8,192 rows, and
reaches 1,000 to 1,210 TFLOP/s for the latter (docs/figures/kernels.json).
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F

from atom_core.kernels.fp8_linear.reference import E4M3
from atom_core.kernels.fp8_linear.scaled_mm import MULTIPLE
from atom_core.kernels.linear.tiles import aligned, on_hopper
from atom_core.quant.fp8 import BLOCK_SIZE

#: Scales that cuBLAS reads together: of rows in one group of the input, and of groups in one block of the weight.
TOGETHER = 4


@functools.lru_cache
def _in_torch() -> bool:
    """Whether this torch has the product; cuBLAS has it since CUDA 12.9."""
    cuda = torch.version.cuda
    return hasattr(F, "scaled_mm") and cuda is not None and tuple(map(int, cuda.split(".")[:2])) >= (12, 9)


def takes(weight: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether :func:`multiply` supports ``weight [N, K]`` in a model of ``dtype``."""
    out_features, in_features = weight.shape
    return (
        on_hopper(weight.device)
        and _in_torch()
        and dtype == torch.bfloat16
        and in_features % BLOCK_SIZE == 0
        and out_features % MULTIPLE == 0
        and aligned(weight)
    )


def multiply(
    x: torch.Tensor, x_scales: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """``x W^T + b`` in bfloat16; see :mod:`atom_core.kernels.fp8_block_linear`.

    Args:
        x: in e4m3, ``[T, K]``, ``T`` a multiple of :data:`TOGETHER`.
        x_scales: float32 ``[K / 128, T]``.
        weight: in e4m3, ``[N, K]``.
        scales: of its blocks.
        bias: ``[N]`` in bfloat16.
    """
    assert weight.dtype == x.dtype == E4M3
    assert len(x) % TOGETHER == 0
    missing = -scales.shape[1] % TOGETHER
    y = F.scaled_mm(
        x,
        weight.t(),
        x_scales.t(),
        F.ScalingType.BlockWise1x128,
        (F.pad(scales, (0, missing)) if missing else scales).t(),
        F.ScalingType.BlockWise128x128,
        output_dtype=torch.bfloat16,
    )
    return y if bias is None else y.add_(bias)
