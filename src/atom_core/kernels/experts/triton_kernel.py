"""Experts in Triton. Few tokens need no sorting: a program takes some rows of one expert's weight for one token.

Two launches then: gate and up with their activation, for each token and each of its experts; and down, where a program
goes through all experts of a token, so that the weighted sum stays in its registers and has one order always. More
tokens: :mod:`.grouped`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch
import triton
import triton.language as tl

from atom_core.config import Activation
from atom_core.kernels.experts.grouped import Held, many_tokens
from atom_core.kernels.gated_activation.triton_kernel import ACTIVATIONS
from atom_core.kernels.linear.parts import finish, products, weight_rows
from atom_core.kernels.opaque import opaque
from atom_core.kernels.triton_support import launch_options

if TYPE_CHECKING:
    from atom_core.kernels.experts import ExpertsSpec, ExpertWeights


#: Tokens up to which each is multiplied by itself.
MAX_TOKENS = 16


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
        sums += products(tile, wide, BLOCK_N, BLOCK_K)
        tile = ahead
        wide = wide_ahead
    total = tl.sum(sums + products(tile, wide, BLOCK_N, BLOCK_K), 1)
    middle += pair.to(tl.int64) * (N // 2)
    finish(total[None, :], None, None, bias, None, middle, row, tl.arange(0, 1), 1, N, 1, BLOCK_N, ACTIVATION)


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
                sums += products(tile, wide, BLOCK_N, BLOCK_K)
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
        return mixture(x, weights, experts, *layer, spec.first, spec.count, spec.activation, self.overlap)


def _fake(
    x: torch.Tensor,
    weights: torch.Tensor,
    experts: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    gate_up_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None,
    first: int,
    count: int,
    activation: str,
    overlap: bool,
) -> torch.Tensor:
    return torch.empty_like(x)


@opaque("experts", _fake)
def mixture(
    x: torch.Tensor,
    weights: torch.Tensor,
    experts: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    gate_up_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None,
    first: int,
    count: int,
    activation: str,
    overlap: bool,
) -> torch.Tensor:
    """See :mod:`atom_core.kernels.experts`; ``first`` and ``count`` say which experts are held."""
    assert x.stride(1) == 1
    assert all(it.is_contiguous() for it in (weights, experts, gate_up, down))
    tokens, hidden = x.shape
    act = ACTIVATIONS[cast(Activation, activation)]
    held = Held(first, count, experts.shape[1])
    if tokens > MAX_TOKENS:
        return many_tokens(x, weights, experts, gate_up, down, gate_up_bias, down_bias, held, act)
    y = torch.empty(tokens, hidden, dtype=x.dtype, device=x.device)
    if not tokens:
        return y
    size = down.shape[2]
    middle = torch.empty(tokens * held.top_k, size, dtype=x.dtype, device=x.device)
    constants = {"FIRST": first, "COUNT": count, "TOP_K": held.top_k, "OVERLAP": overlap, "num_warps": 4}
    columns = min(1024, triton.next_power_of_2(hidden))
    _gate_up[(triton.cdiv(size, 4), tokens * held.top_k)](
        x,
        experts,
        gate_up,
        gate_up_bias,
        middle,
        K=hidden,
        N=2 * size,
        stride_x=x.stride(0),
        BLOCK_N=8,
        BLOCK_K=columns,
        EVEN=hidden % columns == 0,
        ACTIVATION=act,
        **constants,
        **launch_options(overlap),
    )
    columns = min(1024, triton.next_power_of_2(size))
    _down[(triton.cdiv(hidden, 8), tokens)](
        middle,
        weights,
        experts,
        down,
        down_bias,
        y,
        K=size,
        N=hidden,
        BLOCK_N=8,
        BLOCK_K=columns,
        EVEN=size % columns == 0,
        **constants,
        **launch_options(overlap),
    )
    return y
