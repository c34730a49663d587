"""The experts in MXFP4 by aiter's fused MoE on gfx950, which rounds the inputs of both products itself.

aiter takes the smallest scale that clips none of 32 values. AMD Quark's "even", and so our other kernels, may take half
of that scale, which clips the largest value but resolves the others better. aiter has no option for it.
"""

from __future__ import annotations

import torch

from atom_core.kernels.aiter_library import LooksUpTokens, aiter_enum, aiter_function, require
from atom_core.kernels.custom_op import custom_op
from atom_core.kernels.experts.aiter_kernel import as_shuffled
from atom_core.kernels.mxfp4_experts import Mxfp4Weights
from atom_core.kernels.mxfp4_linear.aiter_kernel import FP4, ShuffledMxfp4Weight


class AiterMxfp4Experts(LooksUpTokens):
    """See :class:`atom_core.kernels.mxfp4_experts.Mxfp4ExpertsKernel`."""

    def __init__(self) -> None:
        require("aiter.fused_moe.fused_moe")
        aiter_enum("ActivationType", "Silu")
        aiter_enum("QuantType", "per_1x32")
        self.gate_up, self.down = ShuffledMxfp4Weight(), ShuffledMxfp4Weight()

    def adopt(self, layer: Mxfp4Weights) -> None:
        """Preshuffle the weights."""
        self.gate_up.adopt(layer.gate_up, layer.gate_up_scale)
        self.down.adopt(layer.down, layer.down_scale)

    def move_back(self, *weights: torch.Tensor) -> None:
        """See :class:`atom_core.kernels.moved.MovingKernel`."""
        for blocks, shuffled in zip(weights, (self.gate_up, self.down), strict=True):
            shuffled.move_back(blocks)

    def __call__(
        self, x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor, layer: Mxfp4Weights
    ) -> torch.Tensor:
        """See :class:`atom_core.kernels.mxfp4_experts.Mxfp4ExpertsKernel`; the layer's scales are not used."""
        gate_up, down = (layer.gate_up, self.gate_up()), (layer.down, self.down())
        y: torch.Tensor = _mxfp4_experts(x.contiguous(), weights, experts, *gate_up, *down)
        return y


def _as_x(
    x: torch.Tensor,
    weights: torch.Tensor,
    experts: torch.Tensor,
    gate_up: torch.Tensor,
    gate_up_scale: torch.Tensor,
    down: torch.Tensor,
    down_scale: torch.Tensor,
) -> torch.Tensor:
    return torch.empty_like(x)


@custom_op("aiter_mxfp4_experts", _as_x)
def _mxfp4_experts(
    x: torch.Tensor,
    weights: torch.Tensor,
    experts: torch.Tensor,
    gate_up: torch.Tensor,
    gate_up_scale: torch.Tensor,
    down: torch.Tensor,
    down_scale: torch.Tensor,
) -> torch.Tensor:
    if not len(x):
        return torch.empty_like(x)
    y: torch.Tensor = aiter_function("aiter.fused_moe.fused_moe")(
        x,
        as_shuffled(gate_up.view(FP4)),
        as_shuffled(down.view(FP4)),
        weights,
        experts,
        activation=aiter_enum("ActivationType", "Silu"),
        quant_type=aiter_enum("QuantType", "per_1x32"),
        w1_scale=gate_up_scale,
        w2_scale=down_scale,
    )
    return y
