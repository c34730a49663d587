"""The experts in FP8 by aiter's fused MoE, which quantises the inputs of both products itself.

See :mod:`atom_core.kernels.fp8_linear.aiter_kernel` for gfx942's variant of e4m3.
"""

from __future__ import annotations

import torch

from atom_core.kernels.aiter_library import LooksUpTokens, aiter_enum, aiter_function, require
from atom_core.kernels.custom_op import custom_op
from atom_core.kernels.experts.aiter_kernel import as_shuffled, expert_mask
from atom_core.kernels.fp8_experts import Fp8ExpertsSpec, Fp8ExpertWeights
from atom_core.kernels.fp8_linear.aiter_kernel import ShuffledWeight
from atom_core.kernels.select import Target


class AiterFp8Experts(LooksUpTokens):
    """See :class:`atom_core.kernels.fp8_experts.Fp8ExpertsKernel`."""

    def __init__(self, spec: Fp8ExpertsSpec, target: Target) -> None:
        require("aiter.fused_moe.fused_moe")
        self.quantized = "per_128x128" if spec.block else "per_Token"
        aiter_enum("ActivationType", "Silu")
        aiter_enum("QuantType", self.quantized)
        self.spec = spec
        self.gate_up, self.down = ShuffledWeight(target), ShuffledWeight(target)
        self.mask: torch.Tensor | None = None

    def adopt(self, layer: Fp8ExpertWeights) -> None:
        """Preshuffle the weights."""
        scales = layer.gate_up_scale.data, layer.down_scale.data
        if not self.spec.block:
            scales = scales[0][..., None], scales[1][..., None]
        self.gate_up.adopt(layer.gate_up, scales[0])
        self.down.adopt(layer.down, scales[1])
        self.mask = expert_mask(self.spec.first, self.spec.count, self.spec.total, layer.down.device, self.mask)

    def move_back(self, *weights: torch.Tensor) -> None:
        """See :class:`atom_core.kernels.moved.MovingKernel`."""
        for weight, shuffled in zip(weights, (self.gate_up, self.down), strict=True):
            shuffled.move_back(weight)

    def __call__(
        self, x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor, layer: Fp8ExpertWeights
    ) -> torch.Tensor:
        """See :class:`atom_core.kernels.fp8_experts.Fp8ExpertsKernel`; the layer's scales are not used."""
        gate_up, down = self.gate_up(layer.gate_up), self.down(layer.down)
        y: torch.Tensor = _fp8_experts(x.contiguous(), weights, experts, *gate_up, *down, self.mask, self.quantized)
        return y


def _as_x(
    x: torch.Tensor,
    weights: torch.Tensor,
    experts: torch.Tensor,
    gate_up: torch.Tensor,
    gate_up_scale: torch.Tensor,
    down: torch.Tensor,
    down_scale: torch.Tensor,
    mask: torch.Tensor | None,
    quantized: str,
) -> torch.Tensor:
    return torch.empty_like(x)


@custom_op("aiter_fp8_experts", _as_x)
def _fp8_experts(
    x: torch.Tensor,
    weights: torch.Tensor,
    experts: torch.Tensor,
    gate_up: torch.Tensor,
    gate_up_scale: torch.Tensor,
    down: torch.Tensor,
    down_scale: torch.Tensor,
    mask: torch.Tensor | None,
    quantized: str,
) -> torch.Tensor:
    if not len(x):
        return torch.empty_like(x)
    y: torch.Tensor = aiter_function("aiter.fused_moe.fused_moe")(
        x,
        as_shuffled(gate_up),
        as_shuffled(down),
        weights,
        experts,
        expert_mask=mask,
        activation=aiter_enum("ActivationType", "Silu"),
        quant_type=aiter_enum("QuantType", quantized),
        w1_scale=gate_up_scale,
        w2_scale=down_scale,
    )
    return y
