"""MXFP4 as it is defined, and experts one after the other: a chosen one's weights are made for the time that it runs.

It looks at which experts were chosen, so it cannot be captured in a graph.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from atom_core.kernels.experts.reference import by_expert

if TYPE_CHECKING:
    from atom_core.kernels.experts import ExpertsSpec
    from atom_core.kernels.mxfp4_experts import Mxfp4Weights

_POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
#: What the sixteen codes stand for.
NUMBERS = (*_POSITIVE, *(-number for number in _POSITIVE))


def dequantize(blocks: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``[.., K]`` in ``dtype`` of ``blocks [.., K / 2]`` and ``scales [.., K / 32]``."""
    codes = torch.stack((blocks & 15, blocks >> 4), -1).flatten(-2)
    numbers = torch.tensor(NUMBERS, device=blocks.device)[codes.int()].view(*scales.shape, -1)
    return torch.ldexp(numbers, (scales.int() - 127)[..., None]).flatten(-2).to(dtype)


class ReferenceMxfp4Experts:
    """See :mod:`atom_core.kernels.mxfp4_experts`."""

    def __init__(self, spec: ExpertsSpec) -> None:
        self.spec = spec

    def __call__(
        self, x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor, layer: Mxfp4Weights
    ) -> torch.Tensor:
        """See :class:`atom_core.kernels.mxfp4_experts.Mxfp4ExpertsKernel`."""

        def matrices(expert: int) -> tuple[torch.Tensor, torch.Tensor]:
            gate_up = dequantize(layer.gate_up[expert], layer.gate_up_scale[expert], x.dtype)
            return gate_up, dequantize(layer.down[expert], layer.down_scale[expert], x.dtype)

        return by_expert(x, weights, experts, self.spec, matrices, layer.gate_up_bias, layer.down_bias)
