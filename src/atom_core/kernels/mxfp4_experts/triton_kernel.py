"""Experts in MXFP4 in Triton, for few tokens and for many, as in :mod:`atom_core.kernels.experts`.

In bfloat16 on Hopper :mod:`.hopper` runs both. Inputs that are rounded take a launch before each product.

Few tokens: a program computes some rows of one expert for one token. A group of 32 values has 16 bytes, whose lower
halves are multiplied by the even elements of ``x`` and whose upper halves by the odd ones; the scale is applied once.
Many tokens: weight tiles are converted to the dtype of ``x`` for the tensor cores, which is exact in bfloat16.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import TYPE_CHECKING, cast

import torch
import triton
import triton.language as tl

from atom_core.batch import BatchShape
from atom_core.kernels.custom_op import custom_op
from atom_core.kernels.eviction import EVICT_LAST
from atom_core.kernels.experts.grouped import (
    LocalExperts,
    block_rows,
    combine,
    finish_block,
    grouped_keys,
    sort_by_expert,
)
from atom_core.kernels.gated_activation.triton_kernel import ACTIVATIONS
from atom_core.kernels.launch import entry_kernel
from atom_core.kernels.linear.helpers import finish, weight_rows
from atom_core.kernels.linear.tiles import on_hopper, why_no_gluon
from atom_core.kernels.linear.triton_kernel import Norm
from atom_core.kernels.mxfp4_experts import Mxfp4Weights
from atom_core.kernels.mxfp4_experts.bits import gather, spread
from atom_core.kernels.mxfp4_linear.conversion import number, scale_of
from atom_core.kernels.mxfp4_linear.inputs import prepare
from atom_core.kernels.triton_support import cdiv, launch_options
from atom_core.quant.mxfp4 import GROUP
from atom_core.types import Activation

if TYPE_CHECKING:
    from atom_core.kernels.mxfp4_experts import Mxfp4ExpertsSpec

if why_no_gluon() is None:
    from atom_core.kernels.mxfp4_experts.hopper import keys_on_hopper, mixture_on_hopper
    from atom_core.kernels.mxfp4_experts.many_tokens import many_tokens, pays, takes

#: Largest number of tokens that are multiplied one by one.
MAX_TOKENS = 16


@triton.jit
def _row_products(x, blocks, scales, row, K, N, BLOCK_N: tl.constexpr, GROUPS: tl.constexpr):
    """``[BLOCK_N]``: weight rows at ``blocks`` and ``scales`` by the vector ``x [K]``."""
    group = tl.arange(0, GROUPS)
    byte = tl.arange(0, 16)
    total = tl.zeros([BLOCK_N, GROUPS], tl.float32)
    for begin in tl.range(0, K // 32, GROUPS):
        here = begin + group
        known = here < K // 32
        at = x + here[:, None] * 32 + byte[None, :] * 2
        even = tl.load(at, mask=known[:, None], other=0.0).to(tl.float32)
        odd = tl.load(at + 1, mask=known[:, None], other=0.0).to(tl.float32)
        packed = tl.load(
            blocks + row[:, None, None] * (K // 2) + here[None, :, None] * 16 + byte[None, None, :],
            mask=known[None, :, None],
            other=0,
            eviction_policy="evict_first",
        ).to(tl.int32)
        each = scale_of(tl.load(scales + row[:, None] + here[None, :] * N, mask=known[None, :], other=0))
        products = number(packed & 15) * even[None, :, :] + number(packed >> 4) * odd[None, :, :]
        total += tl.sum(products, 2) * each
    return tl.sum(total, 1)


@entry_kernel
@triton.jit
def _gate_up(
    x,
    experts,
    blocks,
    scales,
    bias,
    intermediate,
    FIRST: tl.constexpr,
    COUNT: tl.constexpr,
    TOP_K: tl.constexpr,
    K,
    N,
    stride_x,
    BLOCK_N: tl.constexpr,
    GROUPS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """``intermediate [T k, N / 2]``: some elements for one routed token."""
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    routed_token = tl.program_id(1)
    expert = tl.load(experts + routed_token).to(tl.int64) - FIRST
    if (expert < 0) | (expert >= COUNT):
        return
    row = weight_rows(N, BLOCK_N, True)
    blocks += expert * N * (K // 2)
    scales += expert * N * (K // 32)
    if bias is not None:
        bias += expert * N
    x += (routed_token // TOP_K).to(tl.int64) * stride_x
    total = _row_products(x, blocks, scales, row, K, N, BLOCK_N, GROUPS)
    intermediate += routed_token.to(tl.int64) * (N // 2)
    finish(total[None, :], None, None, bias, None, intermediate, row, tl.arange(0, 1), 1, N, 1, BLOCK_N, ACTIVATION)


@entry_kernel
@triton.jit
def _down(
    intermediate,
    weights,
    experts,
    blocks,
    scales,
    bias,
    residual,
    y,
    FIRST: tl.constexpr,
    COUNT: tl.constexpr,
    TOP_K: tl.constexpr,
    K,
    N,
    BLOCK_N: tl.constexpr,
    GROUPS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Some of ``y [T, N]`` for one token, plus ``residual`` if there is one."""
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    token = tl.program_id(1)
    row = weight_rows(N, BLOCK_N, False)
    total = tl.zeros([BLOCK_N], tl.float32)
    for place in tl.static_range(TOP_K):
        routed_token = token * TOP_K + place
        expert = tl.load(experts + routed_token).to(tl.int64) - FIRST
        if (expert >= 0) & (expert < COUNT):
            output = _row_products(
                intermediate + routed_token.to(tl.int64) * K,
                blocks + expert * N * (K // 2),
                scales + expert * N * (K // 32),
                row,
                K,
                N,
                BLOCK_N,
                GROUPS,
            )
            if bias is not None:
                output += tl.load(bias + expert * N + row).to(tl.float32)
            total += tl.load(weights + routed_token) * output
    out = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    at = token.to(tl.int64) * N + out
    if residual is not None:
        total += tl.load(residual + at, mask=out < N, other=0.0).to(tl.float32)
    tl.store(y + at, total.to(y.dtype.element_ty), mask=out < N, eviction_policy=EVICT_LAST)


@entry_kernel
@triton.jit
def _multiply(
    x,
    slots,
    block_experts,
    weights,
    blocks,
    scales,
    bias,
    out,
    K,
    N,
    stride_x,
    TOP_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ACTIVATION: tl.constexpr,
):
    """A block of routed tokens of one expert by some rows of its weight; as in :mod:`atom_core.kernels.experts`."""
    GATED: tl.constexpr = ACTIVATION is not None
    block = tl.program_id(1)
    expert = tl.load(block_experts + block).to(tl.int64)
    if expert < 0:
        return
    slot = block.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    routed_token = tl.load(slots + slot).to(tl.int64)
    used = routed_token >= 0
    row = weight_rows(N, BLOCK_N, GATED)
    column = tl.arange(0, BLOCK_K)
    byte = tl.arange(0, BLOCK_K // 2)
    x_row = routed_token // TOP_K if GATED else slot
    x_at = x + x_row[:, None] * stride_x + column[None, :]
    at = blocks + (expert * N + row)[:, None] * (K // 2) + byte[None, :]
    scale_at = scales + (expert * N * (K // 32) + row)[:, None] + (byte // 16 * N)[None, :]
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for begin in tl.range(0, K, BLOCK_K):
        left = tl.load(x_at + begin, mask=used[:, None] & (begin + column < K)[None, :], other=0.0)
        known = (begin + 2 * byte < K)[None, :]
        packed = tl.load(at + begin // 2, mask=known, other=0).to(tl.int32)
        each = scale_of(tl.load(scale_at + begin // 32 * N, mask=known, other=0))
        values = tl.join(number(packed & 15) * each, number(packed >> 4) * each)
        right = tl.reshape(values, (BLOCK_N, BLOCK_K)).to(left.dtype)
        total = tl.dot(left, tl.trans(right), total, input_precision="ieee")
    finish_block(total, weights, bias, out, expert, routed_token, slot, used, row, N, BLOCK_M, BLOCK_N, ACTIVATION)


class TritonMxfp4Experts:
    """See the module and :mod:`atom_core.kernels.mxfp4_experts`.

    Args:
        spec: the layer.
        overlap: see :func:`atom_core.kernels.triton_support.overlaps`.
    """

    max_normed = 1

    def __init__(self, spec: Mxfp4ExpertsSpec, overlap: bool) -> None:
        self.spec, self.overlap = spec, overlap
        self.local_experts = LocalExperts(spec.first, spec.count, spec.top_k, whole=spec.total == spec.count)

    def compile_keys(self, shape: BatchShape, device: torch.device) -> Iterator[Hashable]:
        """See :class:`atom_core.kernels.compile_keys.CompileKeys`."""
        tokens, spec, local_experts = shape.num_expert_tokens, self.spec, self.local_experts
        whole = spec.hidden_size % 64 == spec.intermediate_size % 64 == 0
        if _by_hopper(spec.dtype, device) and not (whole and pays(tokens, local_experts)):
            yield from keys_on_hopper(tokens, local_experts)
        elif tokens <= MAX_TOKENS:
            yield "few"
        else:
            yield from grouped_keys(tokens, local_experts, block_rows(tokens, local_experts))

    def adopt(self, layer: Mxfp4Weights) -> None:
        """Reorder bits for the Hopper kernel."""
        if _by_hopper(self.spec.dtype, layer.gate_up.device):
            spread(layer.gate_up)
            spread(layer.down)

    def move_back(self, *weights: torch.Tensor) -> None:
        """See :class:`atom_core.kernels.moved.MovingKernel`."""
        for blocks in weights:
            if _by_hopper(self.spec.dtype, blocks.device):
                gather(blocks)

    def __call__(
        self, x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor, layer: Mxfp4Weights
    ) -> torch.Tensor:
        """See :class:`atom_core.kernels.mxfp4_experts.Mxfp4ExpertsKernel`."""
        spec = self.spec
        return mixture(
            x, weights, experts, *layer, spec.first, spec.count, spec.activation, spec.rounded_inputs, self.overlap
        )

    def add(
        self,
        x: torch.Tensor,
        weights: torch.Tensor,
        experts: torch.Tensor,
        layer: Mxfp4Weights,
        residual: torch.Tensor,
    ) -> torch.Tensor:
        """See :class:`atom_core.kernels.experts.AddingExpertsKernel`."""
        return self._launch(x, weights, experts, layer, residual, None)

    def add_after_norm(
        self,
        stream: torch.Tensor,
        norm: torch.Tensor,
        eps: float,
        weights: torch.Tensor,
        experts: torch.Tensor,
        layer: Mxfp4Weights,
    ) -> torch.Tensor:
        """See :class:`atom_core.kernels.experts.AddingExpertsKernel`."""
        assert len(stream) == self.max_normed
        return self._launch(stream, weights, experts, layer, stream, Norm(norm, eps))

    def _launch(
        self,
        x: torch.Tensor,
        weights: torch.Tensor,
        experts: torch.Tensor,
        layer: Mxfp4Weights,
        residual: torch.Tensor,
        norm: Norm | None,
    ) -> torch.Tensor:
        act, rounded = self.spec.activation, self.spec.rounded_inputs
        return _launch(x, weights, experts, layer, self.local_experts, act, rounded, self.overlap, residual, norm)


def _by_hopper(dtype: torch.dtype, device: torch.device) -> bool:
    return dtype == torch.bfloat16 and on_hopper(device)


def _fake(
    x: torch.Tensor,
    weights: torch.Tensor,
    experts: torch.Tensor,
    gate_up: torch.Tensor,
    gate_up_scale: torch.Tensor,
    down: torch.Tensor,
    down_scale: torch.Tensor,
    gate_up_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None,
    first: int,
    count: int,
    activation: str,
    rounded_inputs: bool,
    overlap: bool,
) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@custom_op("mxfp4_experts", _fake)
def mixture(
    x: torch.Tensor,
    weights: torch.Tensor,
    experts: torch.Tensor,
    gate_up: torch.Tensor,
    gate_up_scale: torch.Tensor,
    down: torch.Tensor,
    down_scale: torch.Tensor,
    gate_up_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None,
    first: int,
    count: int,
    activation: str,
    rounded_inputs: bool,
    overlap: bool,
) -> torch.Tensor:
    """See :mod:`atom_core.kernels.mxfp4_experts`; ``first`` and ``count`` describe the local experts."""
    layer = Mxfp4Weights(gate_up, gate_up_scale, down, down_scale, gate_up_bias, down_bias)
    local_experts = LocalExperts(first, count, experts.shape[1])
    act = cast(Activation, activation)
    return _launch(x, weights, experts, layer, local_experts, act, rounded_inputs, overlap, None, None)


def _launch(
    x: torch.Tensor,
    weights: torch.Tensor,
    experts: torch.Tensor,
    layer: Mxfp4Weights,
    local_experts: LocalExperts,
    activation: Activation,
    rounded_inputs: bool,
    overlap: bool,
    residual: torch.Tensor | None,
    norm: Norm | None,
) -> torch.Tensor:
    """``residual``: contiguous; it is added to and returned. ``norm``: the RMS norm to apply to ``x`` first."""
    assert x.stride(1) == 1
    assert all(it.is_contiguous() for it in (weights, experts, layer.gate_up, layer.down))
    assert all(it.transpose(1, 2).is_contiguous() for it in (layer.gate_up_scale, layer.down_scale))
    assert residual is None or residual.is_contiguous()
    tokens, hidden = x.shape
    size = 2 * layer.down.shape[2]
    assert hidden % GROUP == size % GROUP == 0
    if not tokens:
        return torch.empty_like(x, memory_format=torch.contiguous_format) if residual is None else residual
    run = _few_tokens if tokens <= MAX_TOKENS else _many_tokens
    if _by_hopper(x.dtype, x.device):
        run = mixture_on_hopper
        if pays(tokens, local_experts) and takes(x, size):
            assert norm is None
            if rounded_inputs:
                x = prepare(x, overlap, rounds=True, planes=1)
            run = many_tokens
    elif rounded_inputs or norm is not None:
        x = prepare(x, overlap, rounds=rounded_inputs, planes=1, norm=norm)
    return run(
        x,
        weights,
        experts,
        (layer.gate_up, layer.gate_up_scale, layer.gate_up_bias),
        (layer.down, layer.down_scale, layer.down_bias),
        local_experts,
        ACTIVATIONS[activation],
        rounded_inputs,
        overlap,
        residual,
        norm,
    )


def _few_tokens(
    x: torch.Tensor,
    weights: torch.Tensor,
    experts: torch.Tensor,
    gate_up: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None],
    down: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None],
    local_experts: LocalExperts,
    activation: int,
    rounded_inputs: bool,
    overlap: bool,
    residual: torch.Tensor | None,
    norm: Norm | None,
) -> torch.Tensor:
    """``x`` is already normed and rounded."""
    (tokens, hidden), size = x.shape, 2 * down[0].shape[2]
    y = torch.empty(tokens, hidden, dtype=x.dtype, device=x.device) if residual is None else residual
    intermediate = torch.empty(tokens * local_experts.top_k, size, dtype=x.dtype, device=x.device)
    constants = {
        "FIRST": local_experts.first,
        "COUNT": local_experts.count,
        "TOP_K": local_experts.top_k,
        "BLOCK_N": 8,
        "GROUPS": 32,
        "OVERLAP": overlap,
        "num_warps": 4,
        **launch_options(overlap),
    }
    _gate_up[(cdiv(size, 4), tokens * local_experts.top_k)](
        x,
        experts,
        *gate_up,
        intermediate,
        K=hidden,
        N=2 * size,
        stride_x=x.stride(0),
        ACTIVATION=activation,
        **constants,
    )
    if rounded_inputs:
        intermediate = prepare(intermediate, overlap, rounds=True, planes=1)
    _down[(cdiv(hidden, 8), tokens)](intermediate, weights, experts, *down, residual, y, K=size, N=hidden, **constants)
    return y


def _many_tokens(
    x: torch.Tensor,
    weights: torch.Tensor,
    experts: torch.Tensor,
    gate_up: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None],
    down: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None],
    local_experts: LocalExperts,
    activation: int,
    rounded_inputs: bool,
    overlap: bool,
    residual: torch.Tensor | None,
    norm: Norm | None,
) -> torch.Tensor:
    """``x`` is already normed and rounded."""
    (tokens, hidden), size, top_k = x.shape, 2 * down[0].shape[2], local_experts.top_k
    sorted_tokens = sort_by_expert(experts, local_experts, block_rows(tokens, local_experts))
    num_blocks, rows = len(sorted_tokens.experts), sorted_tokens.rows
    tile = {"TOP_K": top_k, "BLOCK_M": rows, "BLOCK_N": 64, "BLOCK_K": 64, "num_warps": 4 if rows < 64 else 8}
    at = (sorted_tokens.slots, sorted_tokens.experts)
    intermediate = torch.empty(num_blocks * rows, size, dtype=x.dtype, device=x.device)
    _multiply[(cdiv(2 * size, tile["BLOCK_N"]), num_blocks)](
        x, *at, None, *gate_up, intermediate, hidden, 2 * size, x.stride(0), ACTIVATION=activation, **tile
    )
    if rounded_inputs:
        intermediate = prepare(intermediate, False, rounds=True, planes=1, slots=sorted_tokens.slots)
    outputs = torch.empty(tokens * top_k, hidden, dtype=x.dtype, device=x.device)
    _multiply[(cdiv(hidden, tile["BLOCK_N"]), num_blocks)](
        intermediate, *at, weights, *down, outputs, size, hidden, size, ACTIVATION=None, **tile
    )
    return combine(outputs, experts, local_experts, x.dtype, False, residual)
