"""MXFP4 by MXFP4 by aiter, on gfx950: its quantiser, then a product that reads numbers and scales in its own order.

The quantiser is told to round as AMD Quark does; by default it takes a larger scale where one would cut numbers. It
keeps no NaN: such a number becomes one of e2m1's.
"""

from __future__ import annotations

import torch

from atom_core.kernels.aiter_library import aiter_function, require
from atom_core.kernels.custom_op import custom_op
from atom_core.kernels.fp8_linear.aiter_kernel import shuffle_in_place, unshuffle_in_place

#: Two numbers a byte, and the powers of two that are their scales: what aiter knows MXFP4 by (aiter/utility/dtypes.py).
FP4 = getattr(torch, "float4_e2m1fn_x2", torch.uint8)
E8M0 = getattr(torch, "float8_e8m0fnu", torch.uint8)
#: The number of "even" among aiter's ways to find a scale (aiter/utility/mx_types.py:45).
EVEN = 2


class ShuffledMxfp4Weight:
    """A layer's weight in the order that aiter's products read.

    The layer keeps the packed numbers, whose bytes are moved in place; scales are kept here, since the layer's are
    loaded again with new weights. What graphs have captured stays where it is.
    """

    def __init__(self) -> None:
        require("aiter.ops.shuffle.shuffle_weight", "aiter.utility.fp4_utils.e8m0_shuffle")
        self.scales: torch.Tensor | None = None

    def adopt(self, blocks: torch.Tensor, scales: torch.Tensor) -> None:
        """Move the loaded ``blocks [N, K / 2]``, or ``[E, N, K / 2]`` of experts, and keep their ``scales``."""
        shuffle_in_place(blocks.data)
        moved = _moved_scales(scales.data.reshape(-1, scales.shape[-1]).contiguous())
        if self.scales is None:
            self.scales = torch.empty_like(moved)
        self.scales.copy_(moved)

    def move_back(self, blocks: torch.Tensor) -> None:
        """See :class:`atom_core.kernels.moved.MovingKernel`; the layer has the scales as they were loaded."""
        unshuffle_in_place(blocks.data)

    def __call__(self) -> torch.Tensor:
        """The scales, uint8 ``[E N, K / 32]``, rows filled up to 256."""
        assert self.scales is not None, "weights are adopted before they are multiplied by"
        return self.scales


def _filled_up(scales: torch.Tensor) -> torch.Tensor:
    rows, groups = scales.shape
    return scales.new_empty(-(-rows // 256) * 256, -(-groups // 8) * 8)


@custom_op("aiter_shuffle_scales", _filled_up)
def _moved_scales(scales: torch.Tensor) -> torch.Tensor:
    moved: torch.Tensor = aiter_function("aiter.utility.fp4_utils.e8m0_shuffle")(scales)
    return moved


class AiterMxfp4Linear:
    """See :class:`atom_core.kernels.mxfp4_linear.Mxfp4LinearKernel`."""

    def __init__(self) -> None:
        require("aiter.quant_mxfp4_hip", "aiter.gemm_a4w4")
        self.shuffled = ShuffledMxfp4Weight()

    def adopt(self, blocks: torch.Tensor, scales: torch.Tensor) -> None:
        """Move the weight's bytes."""
        self.shuffled.adopt(blocks, scales)

    def move_back(self, *weights: torch.Tensor) -> None:
        """See :class:`atom_core.kernels.moved.MovingKernel`."""
        for blocks in weights:
            self.shuffled.move_back(blocks)

    def __call__(
        self, x: torch.Tensor, blocks: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """``x [T, K]`` to ``[T, N]``; ``scales`` are the layer's, of which this keeps its own."""
        y: torch.Tensor = _mxfp4_linear(x.contiguous(), blocks, self.shuffled())
        return y if bias is None else y.add_(bias)


@custom_op("aiter_mxfp4_linear", lambda x, blocks, scales: x.new_empty(x.shape[0], blocks.shape[0]))
def _mxfp4_linear(x: torch.Tensor, blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    if not len(x):
        return x.new_empty(0, blocks.shape[0])
    quantized, x_scales = aiter_function("aiter.quant_mxfp4_hip")(x, round_mode=EVEN, e8m0_shuffle=True)
    y: torch.Tensor = aiter_function("aiter.gemm_a4w4")(
        quantized, blocks.view(FP4), x_scales, scales.view(E8M0), dtype=x.dtype
    )
    return y
