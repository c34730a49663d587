"""Experts one after the other in torch: products and sums over a token's experts in float32.

The host reads which experts are used, so this cannot be captured in a CUDA graph.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from atom_core.kernels.experts.reference import routed_tokens_by_expert
from atom_core.kernels.fp8_block_linear.reference import ReferenceFp8BlockLinear
from atom_core.kernels.fp8_linear.reference import ReferenceFp8Linear
from atom_core.kernels.gated_activation.reference import gated_activation

if TYPE_CHECKING:
    from atom_core.kernels.fp8_experts import Fp8ExpertsSpec, Fp8ExpertWeights


class ReferenceFp8Experts:
    """See :mod:`atom_core.kernels.fp8_experts`."""

    def __init__(self, spec: Fp8ExpertsSpec) -> None:
        self.spec = spec
        self._by_rows, self._by_blocks = ReferenceFp8Linear(), ReferenceFp8BlockLinear()

    def adopt(self, layer: Fp8ExpertWeights) -> None:
        """Nothing to change."""

    def _product(self, x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return (
            self._by_blocks(x, weight, scale, None) if self.spec.block else self._by_rows(x, weight, scale, None, None)
        )

    def __call__(
        self, x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor, layer: Fp8ExpertWeights
    ) -> torch.Tensor:
        """See :class:`atom_core.kernels.fp8_experts.Fp8ExpertsKernel`."""
        spec = self.spec
        total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        for expert, routed_tokens in routed_tokens_by_expert(experts, spec.first, spec.count):
            tokens = routed_tokens // spec.top_k
            gate_up = self._product(x[tokens], layer.gate_up[expert], layer.gate_up_scale[expert])
            intermediate = gated_activation(gate_up, spec.activation)
            output = self._product(intermediate, layer.down[expert], layer.down_scale[expert])
            total.index_add_(0, tokens, output.float() * weights.flatten()[routed_tokens, None])
        return total.to(x.dtype)
