"""MXFP4 by MXFP4 by aiter on gfx950: its quantisation, then a product with preshuffled weights and scales.

The quantisation rounds like AMD Quark's here; aiter's default takes a larger scale where one would clip values. It does
not keep NaN, which becomes some e2m1 value.
"""

from __future__ import annotations

import torch

from atom_core.kernels.aiter_library import LooksUpTokens, aiter_function, require
from atom_core.kernels.custom_op import custom_op
from atom_core.kernels.fp8_linear.aiter_kernel import shuffle_in_place, unshuffle_in_place

#: aiter's dtypes for two packed values and for their power-of-two scales (aiter/utility/dtypes.py).
FP4 = getattr(torch, "float4_e2m1fn_x2", torch.uint8)
E8M0 = getattr(torch, "float8_e8m0fnu", torch.uint8)
#: aiter's rounding mode "even" of a scale (aiter/utility/mx_types.py:45).
EVEN = 2


class ShuffledMxfp4Weight:
    """A layer's preshuffled weight.

    The layer has the packed values, which are reordered in place. The scales are stored here, because new weights load
    the layer's again. Both keep their addresses, which CUDA graphs have captured.
    """

    def __init__(self) -> None:
        require("aiter.ops.shuffle.shuffle_weight", "aiter.utility.fp4_utils.e8m0_shuffle")
        self.scales: torch.Tensor | None = None

    def adopt(self, blocks: torch.Tensor, scales: torch.Tensor) -> None:
        """Preshuffle the loaded ``blocks [N, K / 2]``, or ``[E, N, K / 2]`` of experts, and store their ``scales``."""
        shuffle_in_place(blocks.data)
        moved = _moved_scales(scales.data.reshape(-1, scales.shape[-1]).contiguous())
        if self.scales is None:
            self.scales = torch.empty_like(moved)
        self.scales.copy_(moved)

    def move_back(self, blocks: torch.Tensor) -> None:
        """See :class:`atom_core.kernels.moved.MovingKernel`; the layer still has the scales as they were loaded."""
        unshuffle_in_place(blocks.data)

    def __call__(self) -> torch.Tensor:
        """The scales, uint8 ``[E N, K / 32]``, padded to a multiple of 256 rows."""
        assert self.scales is not None, "weights are adopted before they are multiplied by"
        return self.scales


def _filled_up(scales: torch.Tensor) -> torch.Tensor:
    rows, groups = scales.shape
    return scales.new_empty(-(-rows // 256) * 256, -(-groups // 8) * 8)


@custom_op("aiter_shuffle_scales", _filled_up)
def _moved_scales(scales: torch.Tensor) -> torch.Tensor:
    moved: torch.Tensor = aiter_function("aiter.utility.fp4_utils.e8m0_shuffle")(scales)
    return moved


class AiterMxfp4Linear(LooksUpTokens):
    """See :class:`atom_core.kernels.mxfp4_linear.Mxfp4LinearKernel`."""

    def __init__(self) -> None:
        require("aiter.quant_mxfp4_hip", "aiter.gemm_a4w4")
        self.shuffled = ShuffledMxfp4Weight()

    def adopt(self, blocks: torch.Tensor, scales: torch.Tensor) -> None:
        """Preshuffle the weight."""
        self.shuffled.adopt(blocks, scales)

    def move_back(self, *weights: torch.Tensor) -> None:
        """See :class:`atom_core.kernels.moved.MovingKernel`."""
        for blocks in weights:
            self.shuffled.move_back(blocks)

    def __call__(
        self, x: torch.Tensor, blocks: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """``x [T, K]`` to ``[T, N]``; the layer's ``scales`` are not used."""
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
