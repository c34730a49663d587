"""FP8 experts in Triton: activations are quantised in a launch of their own, for gate and up and again for down.

Up to :data:`MAX_TOKENS` tokens are multiplied one by one (:mod:`.few_tokens`), more are sorted by expert
(:mod:`.many_tokens`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch

from atom_core.config import Activation
from atom_core.kernels.experts.few_tokens import MAX_TOKENS
from atom_core.kernels.experts.grouped import Held, block_rows, combine, sort_by_expert
from atom_core.kernels.fp8_block_linear.quantize import quantize_groups
from atom_core.kernels.fp8_experts.few_tokens import down_of_tokens, gate_up_of_pairs
from atom_core.kernels.fp8_experts.many_tokens import multiply_blocks
from atom_core.kernels.fp8_linear.scaled_mm import FNUZ, clear_minus_zeros, dtype_of
from atom_core.kernels.gated_activation.triton_kernel import ACTIVATIONS
from atom_core.kernels.opaque import opaque
from atom_core.kernels.select import Target
from atom_core.quant.fp8 import BLOCK_SIZE

if TYPE_CHECKING:
    from atom_core.kernels.fp8_experts import Fp8ExpertsSpec, Fp8ExpertWeights


class TritonFp8Experts:
    """See the module's text and :mod:`atom_core.kernels.fp8_experts`.

    Args:
        spec: the layer.
        target: the device.
        overlap: see :func:`atom_core.kernels.triton_support.overlaps`.
    """

    def __init__(self, spec: Fp8ExpertsSpec, target: Target, overlap: bool) -> None:
        self.spec, self.nvidia, self.overlap = spec, target.kind == "cuda", overlap
        self.fnuz = dtype_of(target) == FNUZ

    def adopt(self, layer: Fp8ExpertWeights) -> None:
        """Mend what the device would read otherwise."""
        if self.fnuz:
            clear_minus_zeros(layer.gate_up)
            clear_minus_zeros(layer.down)

    def __call__(
        self, x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor, layer: Fp8ExpertWeights
    ) -> torch.Tensor:
        """See :class:`atom_core.kernels.fp8_experts.Fp8ExpertsKernel`."""
        spec = self.spec
        gate_up, down = (it.view(FNUZ) if self.fnuz else it for it in (layer.gate_up, layer.down))
        return fp8_mixture(
            x,
            weights,
            experts,
            gate_up,
            layer.gate_up_scale,
            down,
            layer.down_scale,
            spec.first,
            spec.count,
            BLOCK_SIZE if spec.block else 0,
            spec.activation,
            self.nvidia,
            self.overlap,
        )


def _fake(
    x: torch.Tensor,
    weights: torch.Tensor,
    experts: torch.Tensor,
    gate_up: torch.Tensor,
    gate_up_scale: torch.Tensor,
    down: torch.Tensor,
    down_scale: torch.Tensor,
    first: int,
    count: int,
    block: int,
    activation: str,
    nvidia: bool,
    overlap: bool,
) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@opaque("fp8_experts", _fake)
def fp8_mixture(
    x: torch.Tensor,
    weights: torch.Tensor,
    experts: torch.Tensor,
    gate_up: torch.Tensor,
    gate_up_scale: torch.Tensor,
    down: torch.Tensor,
    down_scale: torch.Tensor,
    first: int,
    count: int,
    block: int,
    activation: str,
    nvidia: bool,
    overlap: bool,
) -> torch.Tensor:
    """See :mod:`atom_core.kernels.fp8_experts`; weights are in the device's form of e4m3, scales those of e4m3fn.

    ``first`` and ``count`` say which experts are held; ``block`` is 0 where each row has a scale.
    """
    layer = (weights, experts, gate_up, gate_up_scale, down, down_scale)
    assert all(it.is_contiguous() for it in layer)
    tokens, hidden = x.shape
    if not tokens:
        return x.new_empty(0, hidden)
    act, dtype = ACTIVATIONS[cast(Activation, activation)], x.dtype
    held, group = Held(first, count, experts.shape[1]), block or None
    quantized, scales = quantize_groups(x, gate_up.dtype, overlap, group=group)
    if tokens <= MAX_TOKENS:
        middle = gate_up_of_pairs(
            quantized,
            scales,
            experts,
            gate_up,
            gate_up_scale,
            held,
            block=block,
            activation=act,
            overlap=overlap,
            dtype=dtype,
        )
        quantized, scales = quantize_groups(middle, down.dtype, overlap, group=group)
        return down_of_tokens(
            quantized, scales, weights, experts, down, down_scale, held, block=block, overlap=overlap, dtype=dtype
        )
    blocks = sort_by_expert(experts, held, block_rows(tokens, held))
    middle = x.new_empty(len(blocks.slots), down.shape[2])
    multiply_blocks(
        quantized,
        scales,
        blocks,
        None,
        gate_up,
        gate_up_scale,
        middle,
        top_k=held.top_k,
        block=block,
        activation=act,
        nvidia=nvidia,
    )
    quantized, scales = quantize_groups(middle, down.dtype, overlap, group=group, slots=blocks.slots)
    answers = x.new_empty(tokens * held.top_k, hidden)
    multiply_blocks(
        quantized,
        scales,
        blocks,
        weights,
        down,
        down_scale,
        answers,
        top_k=held.top_k,
        block=block,
        activation=None,
        nvidia=nvidia,
    )
    return combine(answers, experts, held, dtype, overlap)
