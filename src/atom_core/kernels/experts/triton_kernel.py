"""Experts in Triton: few tokens by :mod:`.few_tokens`, more by :mod:`.grouped`."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import cast

import torch

from atom_core.batch import BatchShape
from atom_core.kernels.custom_op import custom_op
from atom_core.kernels.experts import ExpertsSpec, ExpertWeights
from atom_core.kernels.experts.blocked_layout import fits_blocked_layout, from_blocked_layout, to_blocked_layout
from atom_core.kernels.experts.few_tokens import MAX_TOKENS, few_tokens, few_tokens_keys, one_token
from atom_core.kernels.experts.grouped import LocalExperts, grouped_keys, many_tokens, rows_of_blocks
from atom_core.kernels.gated_activation.triton_kernel import ACTIVATIONS
from atom_core.kernels.linear.tiles import on_hopper
from atom_core.kernels.linear.triton_kernel import Norm
from atom_core.types import Activation


class TritonExperts:
    """See the module and :mod:`atom_core.kernels.experts`.

    Args:
        spec: the layer.
        overlap: see :func:`atom_core.kernels.triton_support.overlaps`.
    """

    max_normed = 1

    def __init__(self, spec: ExpertsSpec, overlap: bool) -> None:
        self.spec, self.overlap = spec, overlap
        self.blocked = False
        self.local_experts = LocalExperts(spec.first, spec.count, spec.top_k, spec.total == spec.count, spec.shared)

    def compile_keys(self, shape: BatchShape, device: torch.device) -> Iterator[Hashable]:
        """See :class:`atom_core.kernels.compile_keys.CompileKeys`."""
        tokens, spec, hopper = shape.num_expert_tokens, self.spec, on_hopper(device)
        if tokens == 1:
            yield "one"
        elif tokens <= MAX_TOKENS:
            yield from few_tokens_keys(tokens, self.local_experts, spec.dtype == torch.float32, hopper)
        else:
            shared = hopper and spec.shared > 0 and spec.dtype.itemsize == 2
            yield from grouped_keys(tokens, self.local_experts, rows_of_blocks(tokens, self.local_experts, shared))

    def adopt(self, layer: ExpertWeights) -> bool:
        """On Hopper, bring weights of whole blocks into the blocked layout of :mod:`.blocked_layout`."""
        self.blocked = on_hopper(layer.down.device) and fits_blocked_layout(layer)
        if self.blocked:
            to_blocked_layout(layer.gate_up.data)
            to_blocked_layout(layer.down.data)
        return False

    def move_back(self, *weights: torch.Tensor) -> None:
        """See :class:`atom_core.kernels.moved.MovingKernel`."""
        if self.blocked:
            for weight in weights:
                from_blocked_layout(weight.data)

    def _adopted(self, layer: ExpertWeights) -> ExpertWeights:
        return layer._replace(blocked=self.blocked)

    def __call__(
        self, x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor, layer: ExpertWeights
    ) -> torch.Tensor:
        """See :class:`atom_core.kernels.experts.ExpertsKernel`."""
        spec = self.spec
        local_experts = spec.first, spec.count, spec.shared
        return mixture(x, weights, experts, *self._adopted(layer), *local_experts, spec.activation, self.overlap)

    def add(
        self,
        x: torch.Tensor,
        weights: torch.Tensor,
        experts: torch.Tensor,
        layer: ExpertWeights,
        residual: torch.Tensor,
    ) -> torch.Tensor:
        """See :class:`atom_core.kernels.experts.AddingExpertsKernel`."""
        return _launch(
            x, weights, experts, self._adopted(layer), self.local_experts, self.spec.activation, self.overlap, residual
        )

    def add_after_norm(
        self,
        stream: torch.Tensor,
        norm: torch.Tensor,
        eps: float,
        weights: torch.Tensor,
        experts: torch.Tensor,
        layer: ExpertWeights,
    ) -> torch.Tensor:
        """See :class:`atom_core.kernels.experts.AddingExpertsKernel`."""
        assert len(stream) == self.max_normed
        assert stream.is_contiguous()
        act, given = ACTIVATIONS[self.spec.activation], Norm(norm, eps)
        adopted = self._adopted(layer)
        return one_token(stream, weights, experts, adopted, self.local_experts, act, self.overlap, stream, given)


def _fake(
    x: torch.Tensor,
    weights: torch.Tensor,
    experts: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    gate_up_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None,
    blocked: bool,
    first: int,
    count: int,
    shared: int,
    activation: str,
    overlap: bool,
) -> torch.Tensor:
    return torch.empty_like(x)


@custom_op("experts", _fake)
def mixture(
    x: torch.Tensor,
    weights: torch.Tensor,
    experts: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    gate_up_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None,
    blocked: bool,
    first: int,
    count: int,
    shared: int,
    activation: str,
    overlap: bool,
) -> torch.Tensor:
    """See :mod:`atom_core.kernels.experts`; ``first``, ``count`` and ``shared`` describe the local experts."""
    layer = ExpertWeights(gate_up, down, gate_up_bias, down_bias, blocked)
    local_experts = LocalExperts(first, count, experts.shape[1], shared=shared)
    return _launch(x, weights, experts, layer, local_experts, cast(Activation, activation), overlap, None)


def _launch(
    x: torch.Tensor,
    weights: torch.Tensor,
    experts: torch.Tensor,
    layer: ExpertWeights,
    local_experts: LocalExperts,
    activation: Activation,
    overlap: bool,
    residual: torch.Tensor | None,
) -> torch.Tensor:
    assert x.stride(1) == 1
    assert all(it.is_contiguous() for it in (weights, experts, layer.gate_up, layer.down))
    assert residual is None or residual.is_contiguous()
    tokens = x.shape[0]
    if not tokens:
        return torch.empty_like(x) if residual is None else residual
    run = one_token if tokens == 1 else few_tokens if tokens <= MAX_TOKENS else many_tokens
    return run(x, weights, experts, layer, local_experts, ACTIVATIONS[activation], overlap, residual)
