"""Experts by aiter's fused MoE, which sorts tokens by expert and picks a one- or two-stage kernel for the shape."""

from __future__ import annotations

import torch

from atom_core.kernels.aiter_library import LooksUpTokens, aiter_enum, aiter_function, require
from atom_core.kernels.custom_op import custom_op
from atom_core.kernels.experts import ExpertsSpec, ExpertWeights
from atom_core.kernels.fp8_linear.aiter_kernel import shuffle_in_place, unshuffle_in_place


class AiterExperts(LooksUpTokens):
    """See :class:`atom_core.kernels.experts.ExpertsKernel`; the layer's weights are preshuffled in place."""

    def __init__(self, spec: ExpertsSpec) -> None:
        require("aiter.fused_moe.fused_moe", "aiter.ops.shuffle.shuffle_weight")
        aiter_enum("ActivationType", "Silu")
        aiter_enum("QuantType", "No")
        self.spec = spec
        self.mask: torch.Tensor | None = None

    def adopt(self, layer: ExpertWeights) -> bool:
        """Preshuffle the weights."""
        shuffle_in_place(layer.gate_up.data)
        shuffle_in_place(layer.down.data)
        self.mask = expert_mask(self.spec.first, self.spec.count, self.spec.total, layer.down.device, self.mask)
        return False

    def move_back(self, *weights: torch.Tensor) -> None:
        """See :class:`atom_core.kernels.moved.MovingKernel`."""
        for weight in weights:
            unshuffle_in_place(weight.data)

    def __call__(
        self, x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor, layer: ExpertWeights
    ) -> torch.Tensor:
        """See :class:`atom_core.kernels.experts.ExpertsKernel`."""
        y: torch.Tensor = _experts(x.contiguous(), weights, experts, layer.gate_up, layer.down, self.mask)
        return y


def expert_mask(
    first: int, count: int, total: int | None, device: torch.device, mask: torch.Tensor | None = None
) -> torch.Tensor | None:
    """aiter's expert mask, int32 ``[total]``: 1 for local experts; None: all experts are local.

    It is written to ``mask`` if that exists: a server that slept may have lost what that memory contained.
    """
    if total is None or total == count:
        return None
    if mask is None:
        mask = torch.empty(total, dtype=torch.int32, device=device)
    mask.zero_()
    mask[first : first + count] = 1
    return mask


def as_shuffled(weight: torch.Tensor) -> torch.Tensor:
    """A view of ``weight`` with aiter's attribute for preshuffled weights, which parameters and views do not keep."""
    marked = weight.view(weight.shape)
    marked.is_shuffled = True  # type: ignore[attr-defined]
    return marked


@custom_op("aiter_experts", lambda x, weights, experts, gate_up, down, mask: torch.empty_like(x))
def _experts(
    x: torch.Tensor,
    weights: torch.Tensor,
    experts: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    mask: torch.Tensor | None,
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
        quant_type=aiter_enum("QuantType", "No"),
    )
    return y
