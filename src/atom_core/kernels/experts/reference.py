"""Experts one after the other in torch: products in the model's dtype, sums over a token's experts in float32.

The host reads which experts are used, so this cannot be captured in a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, TypeAlias

import torch
import torch.nn.functional as F

from atom_core.kernels.gated_activation.reference import gated_activation

if TYPE_CHECKING:
    from atom_core.kernels.experts import ExpertsSpec, ExpertWeights

#: ``x W^T + b`` from ``x``, ``W`` and ``b``.
Product: TypeAlias = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]


def routed_tokens_by_expert(experts: torch.Tensor, first: int, count: int) -> Iterator[tuple[int, torch.Tensor]]:
    """For each local expert that is used: its local index, and its routed tokens.

    A routed token is an index into ``experts [T, k]``, flattened.
    """
    local = experts.flatten() - first
    order = local.argsort(stable=True)
    counts = torch.bincount(local[(local >= 0) & (local < count)], minlength=count).tolist()
    begin = int((local < 0).sum())
    for expert, number in enumerate(counts):
        if number:
            yield expert, order[begin : begin + number]
        begin += number


def by_expert(
    x: torch.Tensor,
    weights: torch.Tensor,
    experts: torch.Tensor,
    spec: ExpertsSpec,
    matrices: Callable[[int], tuple[torch.Tensor, torch.Tensor]],
    gate_up_biases: torch.Tensor | None,
    down_biases: torch.Tensor | None,
    inputs: Callable[[torch.Tensor], torch.Tensor] | None = None,
    linear: Product = F.linear,
) -> torch.Tensor:
    """See :mod:`atom_core.kernels.experts`.

    ``matrices`` returns an expert's gate/up and down weights, ``linear`` multiplies by them, and ``inputs`` transforms
    the input rows of either product.
    """
    total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    if inputs is not None:
        x = inputs(x)
    for expert, routed_tokens in routed_tokens_by_expert(experts, spec.first, spec.count):
        tokens = routed_tokens // spec.top_k
        gate_up, down = matrices(expert)
        gate_up_bias = None if gate_up_biases is None else gate_up_biases[expert]
        down_bias = None if down_biases is None else down_biases[expert]
        intermediate = gated_activation(linear(x[tokens], gate_up, gate_up_bias), spec.activation)
        output = linear(intermediate if inputs is None else inputs(intermediate), down, down_bias)
        total.index_add_(0, tokens, output.float() * weights.flatten()[routed_tokens, None])
    return total.to(x.dtype)


class ReferenceExperts:
    """See :mod:`atom_core.kernels.experts`; ``linear`` computes the products."""

    def __init__(self, spec: ExpertsSpec, linear: Product = F.linear) -> None:
        self.spec, self.linear = spec, linear

    def adopt(self, layer: ExpertWeights) -> bool:
        """The weights are read as they are."""
        return False

    def __call__(
        self, x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor, layer: ExpertWeights
    ) -> torch.Tensor:
        """See :class:`atom_core.kernels.experts.ExpertsKernel`."""

        def matrices(expert: int) -> tuple[torch.Tensor, torch.Tensor]:
            return layer.gate_up[expert], layer.down[expert]

        return by_expert(
            x, weights, experts, self.spec, matrices, layer.gate_up_bias, layer.down_bias, linear=self.linear
        )
