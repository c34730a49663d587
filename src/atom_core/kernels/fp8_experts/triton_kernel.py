"""FP8 experts in Triton: few tokens by :mod:`.few_tokens`, more sorted by expert (:mod:`.many_tokens`).

A single token is not quantised. Several are quantised by a separate launch before gate/up and again before down, unless
the gate/up kernel also writes FP8 (:mod:`.hopper`).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Any, cast

import torch

from atom_core.batch import BatchShape
from atom_core.kernels.custom_op import custom_op
from atom_core.kernels.experts.few_tokens import MAX_TOKENS
from atom_core.kernels.experts.grouped import (
    HEADROOM,
    LocalExperts,
    block_rows,
    combine,
    combine_key,
    grouped_keys,
    num_blocks_of,
    sort_by_expert,
)
from atom_core.kernels.fp8_block_linear.quantize import cleared_by_row, quantize_groups
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
    from atom_core.kernels.fp8_experts.hopper import (
        COLUMNS,
        empty_fp8_out,
        multiply_few_routed_tokens,
        pipeline_of_program,
        takes,
    )


class TritonFp8Experts:
    """See the module and :mod:`atom_core.kernels.fp8_experts`.

    Args:
        spec: the layer.
        target: the device.
        overlap: see :func:`atom_core.kernels.triton_support.overlaps`.
    """

    def __init__(self, spec: Fp8ExpertsSpec, target: Target, overlap: bool) -> None:
        self.spec, self.nvidia, self.overlap = spec, target.kind == "cuda", overlap
        self.fnuz = dtype_of(target) == FNUZ
        self.local_experts = LocalExperts(spec.first, spec.count, spec.top_k, spec.total == spec.count, spec.shared)
        self.block = BLOCK_SIZE if spec.block else 0
        self.max_normed = int(takes_one_token(spec.hidden_size, spec.intermediate_size, spec.dtype))

    def compile_keys(self, shape: BatchShape, device: torch.device) -> Iterator[Hashable]:
        """See :class:`atom_core.kernels.compile_keys.CompileKeys`."""
        tokens, spec = shape.num_expert_tokens, self.spec
        if tokens <= MAX_TOKENS:
            yield tokens == 1
            yield combine_key(tokens)
            if tokens > 1 and on_hopper(device):
                hidden, size = spec.hidden_size, spec.intermediate_size
                yield "gate_up", *pipeline_of_program(tokens, self.local_experts, 2 * size, hidden, gated=True)
                yield "down", *pipeline_of_program(tokens, self.local_experts, hidden, size, gated=False)
            return
        whole = spec.hidden_size % 128 == spec.intermediate_size % 128 == 0
        rows = rows_of_blocks(tokens, self.local_experts, self.block, self.nvidia, whole)
        yield from grouped_keys(tokens, self.local_experts, rows)
        if on_hopper(device):
            groups = num_blocks_of(tokens * spec.top_k, self.local_experts, rows) * (spec.intermediate_size // COLUMNS)
            yield rows, cleared_by_row(groups, tokens)

    def adopt(self, layer: Fp8ExpertWeights) -> None:
        """Clear minus zeros, which are NaN in e4m3fnuz."""
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
            self.local_experts.whole,
            spec.shared,
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
            self.local_experts,
            block=self.block,
            activation=self.spec.activation,
            nvidia=self.nvidia,
            overlap=self.overlap,
            residual=residual,
        )

    def add_after_norm(
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
            self.local_experts,
            block=self.block,
            activation=ACTIVATIONS[self.spec.activation],
            nvidia=self.nvidia,
            overlap=self.overlap,
            residual=stream,
            norm=Norm(norm, eps),
        )

    def _stored(self, layer: Fp8ExpertWeights) -> Fp8ExpertWeights:
        """The weights viewed in the device's variant of e4m3."""
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
    whole: bool,
    shared: int,
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
    whole: bool,
    shared: int,
    block: int,
    activation: str,
    nvidia: bool,
    overlap: bool,
) -> torch.Tensor:
    """See :mod:`atom_core.kernels.fp8_experts`; weights are in the device's variant of e4m3, scales for e4m3fn.

    ``first``, ``count``, ``whole`` and ``shared`` describe the local experts; ``block`` is 0 where rows have a scale.
    """
    return _launch(
        x,
        weights,
        experts,
        Fp8ExpertWeights(gate_up, gate_up_scale, down, down_scale),
        LocalExperts(first, count, experts.shape[1], whole, shared),
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
    local_experts: LocalExperts,
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
    single = tokens == 1 and x.storage_offset() % 2 == 0 and takes_one_token(hidden, layer.down.shape[2], x.dtype)
    run = one_token if single else few_tokens if tokens <= MAX_TOKENS else many_tokens
    return run(
        x,
        weights,
        experts,
        layer,
        local_experts,
        block=block,
        activation=ACTIVATIONS[activation],
        nvidia=nvidia,
        overlap=overlap,
        residual=residual,
    )


def rows_of_blocks(tokens: int, local_experts: LocalExperts, block: int, nvidia: bool, whole: bool) -> int:
    """Rows of a block of :func:`many_tokens`; ``whole``: whether both sizes of an expert are multiples of 128."""
    rows = block_rows(tokens, local_experts, HEADROOM if nvidia and block else 1.0)
    # Sums of a group and of all of them have to have room; on AMD more rows spill that need masks.
    return min(64, rows) if (block if nvidia else not whole) else rows


def many_tokens(
    x: torch.Tensor,
    weights: torch.Tensor,
    experts: torch.Tensor,
    layer: Fp8ExpertWeights,
    local_experts: LocalExperts,
    *,
    block: int,
    activation: int,
    nvidia: bool,
    overlap: bool,
    residual: torch.Tensor | None,
) -> torch.Tensor:
    """As :func:`atom_core.kernels.fp8_experts.few_tokens.one_token`, for any number of tokens."""
    tokens, hidden = x.shape
    group, dtype = block or None, layer.gate_up.dtype
    rows = block_rows(tokens, local_experts, HEADROOM if nvidia and block else 1.0)
    if nvidia and block:
        rows = min(64, rows)  # registers must hold the sums of a group and the totals
    if not nvidia and (hidden % 128 or layer.down.shape[2] % 128):
        rows = min(64, rows)  # larger blocks with masks spill registers on AMD
    blocks = sort_by_expert(experts, local_experts, rows, overlap)
    intermediate = x.new_empty(len(blocks.slots), layer.down.shape[2])
    outputs = x.new_empty(tokens * local_experts.top_k, hidden)
    ready = None
    for given, slots, weight, scales, out, shares, act in (
        (x, None, layer.gate_up, layer.gate_up_scale, intermediate, None, activation),
        (intermediate, blocks.slots, layer.down, layer.down_scale, outputs, weights, None),
    ):
        few = on_hopper(x.device) and takes(weight, rows, block, act is not None)
        fp8_out = empty_fp8_out(out, len(blocks.experts), dtype) if few and block and act is not None else None
        if ready is None:
            arrivals = None if fp8_out is None else fp8_out.arrivals
            ready = quantize_groups(given, dtype, overlap, group=group, slots=slots, late=few, cleared=arrivals)
        way: dict[str, Any] = {"block": block, "activation": act, "overlap": overlap}
        if few:
            multiply_few_routed_tokens(
                *ready, experts, blocks, shares, weight, scales, out, local_experts, fp8_out=fp8_out, **way
            )
        else:
            multiply_blocks(
                *ready, blocks, shares, weight, scales, out, top_k=local_experts.top_k, nvidia=nvidia, **way
            )
        ready = None if fp8_out is None else fp8_out.quantized
    return combine(outputs, experts, local_experts, x.dtype, overlap, residual)
