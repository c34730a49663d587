"""Experts one after the other on a CPU, with weights that oneDNN packs once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from atom_core.kernels.experts.reference import by_expert
from atom_core.kernels.linear.mkldnn import pack, packed_linear

if TYPE_CHECKING:
    from atom_core.kernels.experts import ExpertsSpec, ExpertWeights


class MkldnnExperts:
    """See :mod:`atom_core.kernels.experts`."""

    def __init__(self, spec: ExpertsSpec) -> None:
        self.spec = spec

    def adopt(self, layer: ExpertWeights) -> bool:
        """Store the packed weights only."""
        self._packed = [(pack(gate_up), pack(down)) for gate_up, down in zip(layer.gate_up, layer.down, strict=True)]
        return True

    def unpacked(self) -> tuple[torch.Tensor, torch.Tensor]:
        """See :class:`atom_core.kernels.experts.PackingExpertsKernel`."""
        gate_up, down = zip(*self._packed, strict=True)
        return torch.stack([it.to_dense() for it in gate_up]), torch.stack([it.to_dense() for it in down])

    def __call__(
        self, x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor, layer: ExpertWeights
    ) -> torch.Tensor:
        """See :class:`atom_core.kernels.experts.ExpertsKernel`."""
        biases = layer.gate_up_bias, layer.down_bias
        return by_expert(x, weights, experts, self.spec, self._packed.__getitem__, *biases, linear=packed_linear)
