"""Experts of few tokens in Triton, without sorting: a program takes some rows of one expert's weight for one token.

Two launches: gate and up with their activation, for each token and each of its experts; and down, where a program goes
through all experts of a token, so that the weighted sum stays in its registers and is always added up in one order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from atom_core.kernels.gated_activation.triton_kernel import ACTIVATIONS
from atom_core.kernels.linear.parts import finish, weight_rows
from atom_core.kernels.triton_support import launch_options

if TYPE_CHECKING:
    from atom_core.kernels.experts import ExpertsSpec, ExpertWeights


@triton.jit
def _gate_up(
    x,
    experts,
    weight,
    bias,
    middle,
    FIRST: tl.constexpr,
    COUNT: tl.constexpr,
    TOP_K: tl.constexpr,
    K,
    N,
    stride_x,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN: tl.constexpr,
    ACTIVATION: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """``middle [T k, N / 2]`` of a pair of a token and one of its experts."""
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
    pair = tl.program_id(1)
    row = weight_rows(N, BLOCK_N, True)
    column = tl.arange(0, BLOCK_K)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    expert = tl.load(experts + pair) - FIRST
    if (expert < 0) | (expert >= COUNT):
        return
    weight += expert.to(tl.int64) * N * K
    if bias is not None:
        bias += expert.to(tl.int64) * N
    x += (pair // TOP_K).to(tl.int64) * stride_x
    at = weight + row[:, None] * K + column[None, :]
    known = tl.full([BLOCK_K], True, tl.int1) if EVEN else column < K
    tile = tl.load(at, mask=known[None, :], other=0.0, eviction_policy="evict_first")
    wide = tl.load(x + column, mask=known, other=0.0).to(tl.float32)
    sums = tl.zeros([BLOCK_N, BLOCK_K // 8], tl.float32)
    for begin in tl.range(BLOCK_K, K, BLOCK_K):
        if not EVEN:
            known = begin + column < K
        ahead = tl.load(at + begin, mask=known[None, :], other=0.0, eviction_policy="evict_first")
        wide_ahead = tl.load(x + begin + column, mask=known, other=0.0).to(tl.float32)
        sums += _products(tile, wide, BLOCK_N, BLOCK_K)
        tile = ahead
        wide = wide_ahead
    total = tl.sum(sums + _products(tile, wide, BLOCK_N, BLOCK_K), 1)
    middle += pair.to(tl.int64) * (N // 2)
    finish(total[None, :], None, None, bias, None, middle, row, tl.arange(0, 1), 1, N, 1, BLOCK_N, ACTIVATION)


@triton.jit
def _products(tile, wide, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """As in :mod:`atom_core.kernels.linear.one_row`."""
    return tl.sum(tl.reshape(tile.to(tl.float32) * wide[None, :], (BLOCK_N, BLOCK_K // 8, 8)), 2)


@triton.jit
def _down(
    middle,
    weights,
    experts,
    weight,
    bias,
    y,
    FIRST: tl.constexpr,
    COUNT: tl.constexpr,
    TOP_K: tl.constexpr,
    K,
    N,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Some of ``y [T, N]`` of one token."""
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
    token = tl.program_id(1)
    row = weight_rows(N, BLOCK_N, False)
    column = tl.arange(0, BLOCK_K)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    total = tl.zeros([BLOCK_N], tl.float32)
    for place in tl.static_range(TOP_K):
        pair = token * TOP_K + place
        expert = tl.load(experts + pair) - FIRST
        if (expert >= 0) & (expert < COUNT):
            at = weight + expert.to(tl.int64) * N * K + row[:, None] * K + column[None, :]
            here = middle + pair.to(tl.int64) * K
            sums = tl.zeros([BLOCK_N, BLOCK_K // 8], tl.float32)
            for begin in tl.range(0, K, BLOCK_K):
                known = tl.full([BLOCK_K], True, tl.int1) if EVEN else begin + column < K
                tile = tl.load(at + begin, mask=known[None, :], other=0.0, eviction_policy="evict_first")
                wide = tl.load(here + begin + column, mask=known, other=0.0).to(tl.float32)
                sums += _products(tile, wide, BLOCK_N, BLOCK_K)
            answer = tl.sum(sums, 1)
            if bias is not None:
                answer += tl.load(bias + expert.to(tl.int64) * N + row).to(tl.float32)
            total += tl.load(weights + pair) * answer
    out = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    tl.store(y + token.to(tl.int64) * N + out, total.to(y.dtype.element_ty), mask=out < N)


class TritonExperts:
    """See the module's text and :mod:`atom_core.kernels.experts`.

    Args:
        spec: the layer.
        overlap: see :func:`atom_core.kernels.triton_support.overlaps`.
    """

    def __init__(self, spec: ExpertsSpec, overlap: bool) -> None:
        self.spec, self.overlap = spec, overlap

    def __call__(
        self, x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor, layer: ExpertWeights
    ) -> torch.Tensor:
        """See :class:`atom_core.kernels.experts.ExpertsKernel`."""
        spec = self.spec
        tokens, hidden = x.shape
        assert x.stride(1) == 1
        assert all(it.is_contiguous() for it in (weights, experts, layer.gate_up, layer.down))
        y = torch.empty(tokens, hidden, dtype=x.dtype, device=x.device)
        if not tokens:
            return y
        size = spec.intermediate_size
        middle = torch.empty(tokens * spec.top_k, size, dtype=x.dtype, device=x.device)
        columns = min(1024, triton.next_power_of_2(hidden))
        held = {"FIRST": spec.first, "COUNT": spec.count, "TOP_K": spec.top_k, "OVERLAP": self.overlap}
        _gate_up[(triton.cdiv(size, 4), tokens * spec.top_k)](
            x,
            experts,
            layer.gate_up,
            layer.gate_up_bias,
            middle,
            K=hidden,
            N=2 * size,
            stride_x=x.stride(0),
            BLOCK_N=8,
            BLOCK_K=columns,
            EVEN=hidden % columns == 0,
            ACTIVATION=ACTIVATIONS[spec.activation],
            num_warps=4,
            **held,
            **launch_options(self.overlap),
        )
        columns = min(1024, triton.next_power_of_2(size))
        _down[(triton.cdiv(hidden, 8), tokens)](
            middle,
            weights,
            experts,
            layer.down,
            layer.down_bias,
            y,
            K=size,
            N=hidden,
            BLOCK_N=8,
            BLOCK_K=columns,
            EVEN=size % columns == 0,
            num_warps=4,
            **held,
            **launch_options(self.overlap),
        )
        return y
