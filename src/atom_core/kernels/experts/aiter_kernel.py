"""The experts by aiter's fused mixture: tokens sorted by expert, then one product or two, in a kernel for the shape."""

from __future__ import annotations

import torch

from atom_core.kernels.aiter_library import aiter_enum, aiter_function, require
from atom_core.kernels.custom_op import custom_op
from atom_core.kernels.experts import ExpertsSpec, ExpertWeights
from atom_core.kernels.fp8_linear.aiter_kernel import shuffle_in_place, unshuffle_in_place


class AiterExperts:
    """See :class:`atom_core.kernels.experts.ExpertsKernel`; the layer keeps its weights in the order of aiter's."""

    def __init__(self, spec: ExpertsSpec) -> None:
        require("aiter.fused_moe.fused_moe", "aiter.ops.shuffle.shuffle_weight")
        aiter_enum("ActivationType", "Silu")
        aiter_enum("QuantType", "No")
        self.spec = spec
        self.held: torch.Tensor | None = None

    def adopt(self, layer: ExpertWeights) -> bool:
        """Move the weights' numbers."""
        shuffle_in_place(layer.gate_up.data)
        shuffle_in_place(layer.down.data)
        self.held = held_experts(self.spec.first, self.spec.count, self.spec.total, layer.down.device, self.held)
        return False

    def move_back(self, *weights: torch.Tensor) -> None:
        """See :class:`atom_core.kernels.moved.MovingKernel`."""
        for weight in weights:
            unshuffle_in_place(weight.data)

    def __call__(
        self, x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor, layer: ExpertWeights
    ) -> torch.Tensor:
        """See :class:`atom_core.kernels.experts.ExpertsKernel`."""
        y: torch.Tensor = _experts(x.contiguous(), weights, experts, layer.gate_up, layer.down, self.held)
        return y


def held_experts(
    first: int, count: int, total: int | None, device: torch.device, held: torch.Tensor | None = None
) -> torch.Tensor | None:
    """Of each expert of all ranks whether this one holds it, int32 ``[total]``; None: it holds them all.

    Written to ``held``, where there is one already: its memory may have been given back while a server slept.
    """
    if total is None or total == count:
        return None
    if held is None:
        held = torch.empty(total, dtype=torch.int32, device=device)
    held.zero_()
    held[first : first + count] = 1
    return held


def as_shuffled(weight: torch.Tensor) -> torch.Tensor:
    """``weight`` with the mark of aiter's that its numbers were moved, which a parameter or a view does not keep."""
    marked = weight.view(weight.shape)
    marked.is_shuffled = True  # type: ignore[attr-defined]
    return marked


@custom_op("aiter_experts", lambda x, weights, experts, gate_up, down, held: torch.empty_like(x))
def _experts(
    x: torch.Tensor,
    weights: torch.Tensor,
    experts: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    held: torch.Tensor | None,
) -> torch.Tensor:
    if not len(x):
        return torch.empty_like(x)
    y: torch.Tensor = aiter_function("aiter.fused_moe.fused_moe")(
        x,
        as_shuffled(gate_up),
        as_shuffled(down),
        weights,
        experts,
        expert_mask=held,
        activation=aiter_enum("ActivationType", "Silu"),
        quant_type=aiter_enum("QuantType", "No"),
    )
    return y
