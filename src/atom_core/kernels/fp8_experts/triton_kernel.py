"""FP8 experts in Triton: :mod:`.few_tokens`, and more of them sorted by expert (:mod:`.many_tokens`).

One token is not quantised; several are in a launch of their own, for gate and up and again for down, unless gate and up
leave that in FP8 (:mod:`.hopper`).
"""

from __future__ import annotations

from typing import Any, cast

import torch

from atom_core.kernels.custom_op import custom_op
from atom_core.kernels.experts.few_tokens import MAX_TOKENS
from atom_core.kernels.experts.grouped import ROOM, Held, block_rows, combine, sort_by_expert
from atom_core.kernels.fp8_block_linear.quantize import quantize_groups
from atom_core.kernels.fp8_experts import Fp8ExpertsSpec, Fp8ExpertWeights
from atom_core.kernels.fp8_experts.few_tokens import few_tokens, one_token, takes_one_token
from atom_core.kernels.fp8_experts.many_tokens import multiply_blocks
from atom_core.kernels.fp8_linear.scaled_mm import FNUZ, clear_minus_zeros, dtype_of
from atom_core.kernels.gated_activation.triton_kernel import ACTIVATIONS
from atom_core.kernels.linear.tiles import on_hopper, why_no_gluon
from atom_core.kernels.linear.triton_kernel import Norm
from atom_core.kernels.select import Target
from atom_core.quant.fp8 import BLOCK_SIZE
from atom_core.types import Activation

if why_no_gluon() is None:
    from atom_core.kernels.fp8_experts.hopper import multiply_few_pairs, room_to_leave, takes


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
        self.held = Held(spec.first, spec.count, spec.top_k, whole=spec.total == spec.count)
        self.block = BLOCK_SIZE if spec.block else 0
        self.max_normed = int(takes_one_token(spec.hidden_size, spec.intermediate_size, spec.dtype))

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
        return fp8_mixture(
            x,
            weights,
            experts,
            *self._stored(layer),
            spec.first,
            spec.count,
            self.block,
            spec.activation,
            self.nvidia,
            self.overlap,
        )

    def add(
        self,
        x: torch.Tensor,
        weights: torch.Tensor,
        experts: torch.Tensor,
        layer: Fp8ExpertWeights,
        residual: torch.Tensor,
    ) -> torch.Tensor:
        """See :class:`atom_core.kernels.experts.AddingExpertsKernel`."""
        return _launch(
            x,
            weights,
            experts,
            self._stored(layer),
            self.held,
            block=self.block,
            activation=self.spec.activation,
            nvidia=self.nvidia,
            overlap=self.overlap,
            residual=residual,
        )

    def add_behind_norm(
        self,
        stream: torch.Tensor,
        norm: torch.Tensor,
        eps: float,
        weights: torch.Tensor,
        experts: torch.Tensor,
        layer: Fp8ExpertWeights,
    ) -> torch.Tensor:
        """See :class:`atom_core.kernels.experts.AddingExpertsKernel`."""
        assert 0 < len(stream) <= self.max_normed
        assert stream.is_contiguous()
        return one_token(
            stream,
            weights,
            experts,
            self._stored(layer),
            self.held,
            block=self.block,
            activation=ACTIVATIONS[self.spec.activation],
            nvidia=self.nvidia,
            overlap=self.overlap,
            residual=stream,
            norm=Norm(norm, eps),
        )

    def _stored(self, layer: Fp8ExpertWeights) -> Fp8ExpertWeights:
        """The weights in the form of e4m3 that the device multiplies."""
        if not self.fnuz:
            return layer
        return layer._replace(gate_up=layer.gate_up.view(FNUZ), down=layer.down.view(FNUZ))


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


@custom_op("fp8_experts", _fake)
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
    return _launch(
        x,
        weights,
        experts,
        Fp8ExpertWeights(gate_up, gate_up_scale, down, down_scale),
        Held(first, count, experts.shape[1]),
        block=block,
        activation=cast(Activation, activation),
        nvidia=nvidia,
        overlap=overlap,
        residual=None,
    )


def _launch(
    x: torch.Tensor,
    weights: torch.Tensor,
    experts: torch.Tensor,
    layer: Fp8ExpertWeights,
    held: Held,
    *,
    block: int,
    activation: Activation,
    nvidia: bool,
    overlap: bool,
    residual: torch.Tensor | None,
) -> torch.Tensor:
    assert x.stride(1) == 1
    assert all(it.is_contiguous() for it in (weights, experts, *layer))
    assert residual is None or residual.is_contiguous()
    tokens, hidden = x.shape
    if not tokens:
        return x.new_empty(0, hidden) if residual is None else residual
    alone = tokens == 1 and x.storage_offset() % 2 == 0 and takes_one_token(hidden, layer.down.shape[2], x.dtype)
    run = one_token if alone else few_tokens if tokens <= MAX_TOKENS else many_tokens
    return run(
        x,
        weights,
        experts,
        layer,
        held,
        block=block,
        activation=ACTIVATIONS[activation],
        nvidia=nvidia,
        overlap=overlap,
        residual=residual,
    )


def many_tokens(
    x: torch.Tensor,
    weights: torch.Tensor,
    experts: torch.Tensor,
    layer: Fp8ExpertWeights,
    held: Held,
    *,
    block: int,
    activation: int,
    nvidia: bool,
    overlap: bool,
    residual: torch.Tensor | None,
) -> torch.Tensor:
    """See :func:`atom_core.kernels.fp8_experts.few_tokens.one_token`."""
    tokens, hidden = x.shape
    group, dtype = block or None, layer.gate_up.dtype
    rows = block_rows(tokens, held, ROOM if nvidia and block else 1.0)
    if nvidia and block:
        rows = min(64, rows)  # sums of a group and of all of them have to have room
    if not nvidia and (hidden % 128 or layer.down.shape[2] % 128):
        rows = min(64, rows)  # on AMD more of them spill that need masks
    blocks = sort_by_expert(experts, held, rows, overlap)
    middle = x.new_empty(len(blocks.slots), layer.down.shape[2])
    answers = x.new_empty(tokens * held.top_k, hidden)
    ready = None
    for given, slots, weight, scales, out, shares, act in (
        (x, None, layer.gate_up, layer.gate_up_scale, middle, None, activation),
        (middle, blocks.slots, layer.down, layer.down_scale, answers, weights, None),
    ):
        few = on_hopper(x.device) and takes(weight, rows, block, act is not None)
        left = room_to_leave(out, len(blocks.experts), dtype) if few and block and act is not None else None
        if ready is None:
            arrivals = None if left is None else left.arrivals
            ready = quantize_groups(given, dtype, overlap, group=group, slots=slots, late=few, cleared=arrivals)
        way: dict[str, Any] = {"block": block, "activation": act, "overlap": overlap}
        if few:
            multiply_few_pairs(*ready, experts, blocks, shares, weight, scales, out, held, left=left, **way)
        else:
            multiply_blocks(*ready, blocks, shares, weight, scales, out, top_k=held.top_k, nvidia=nvidia, **way)
        ready = None if left is None else left.quantized
    return combine(answers, experts, held, x.dtype, overlap, residual)
