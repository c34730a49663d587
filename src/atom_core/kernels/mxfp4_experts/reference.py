"""Experts one after the other in torch; the weights of an expert are converted while it runs.

The host reads which experts are used, so this cannot be captured in a CUDA graph.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from atom_core.kernels.experts.reference import by_expert
from atom_core.kernels.mxfp4_linear.reference import dequantize, round_groups

if TYPE_CHECKING:
    from atom_core.kernels.mxfp4_experts import Mxfp4ExpertsSpec, Mxfp4Weights


class ReferenceMxfp4Experts:
    """See :mod:`atom_core.kernels.mxfp4_experts`."""

    def __init__(self, spec: Mxfp4ExpertsSpec) -> None:
        self.spec = spec

    def adopt(self, layer: Mxfp4Weights) -> None:
        """Weights stay as they are."""

    def __call__(
        self, x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor, layer: Mxfp4Weights
    ) -> torch.Tensor:
        """See :class:`atom_core.kernels.mxfp4_experts.Mxfp4ExpertsKernel`."""

        def matrices(expert: int) -> tuple[torch.Tensor, torch.Tensor]:
            gate_up = dequantize(layer.gate_up[expert], layer.gate_up_scale[expert], x.dtype)
            return gate_up, dequantize(layer.down[expert], layer.down_scale[expert], x.dtype)

        inputs = round_groups if self.spec.rounded_inputs else None
        biases = (layer.gate_up_bias, layer.down_bias)
        return by_expert(x, weights, experts, self.spec, matrices, *biases, inputs)
