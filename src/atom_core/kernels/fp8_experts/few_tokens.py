"""FP8 experts of few tokens, which are not sorted: a program takes some rows of one expert's weight for one token.

Numbers are multiplied one by one in float32; tensor cores would want 16 tokens of one expert.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from atom_core.kernels.experts.grouped import Held
from atom_core.kernels.linear.parts import finish, products, weight_rows
from atom_core.kernels.triton_support import launch_options


@triton.jit
def _by_row(
    x,
    x_scales,
    weight,
    scales,
    row,
    K,
    stride_x_scales,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SIZE: tl.constexpr,
    EVEN: tl.constexpr,
):
    """One row of ``x`` by rows of one expert's weight; ``SIZE`` is that of a block, or 0 where each row has a scale."""
    column = tl.arange(0, BLOCK_K)
    eight = 8 * tl.arange(0, BLOCK_K // 8)
    sums = tl.zeros([BLOCK_N, BLOCK_K // 8], tl.float32)
    for begin in tl.range(0, K, BLOCK_K):
        known = tl.full([BLOCK_K], True, tl.int1) if EVEN else begin + column < K
        at = weight + row[:, None] * K + (begin + column)[None, :]
        tile = tl.load(at, mask=known[None, :], other=0.0, eviction_policy="evict_first")
        wide = tl.load(x + begin + column, mask=known, other=0.0).to(tl.float32)
        part = products(tile, wide, BLOCK_N, BLOCK_K)
        if SIZE > 0:
            there = begin + eight < K
            group = (begin + eight) // SIZE
            scale_at = scales + row[:, None] // SIZE * tl.cdiv(K, SIZE) + group[None, :]
            mine = tl.load(scale_at, mask=there[None, :], other=0.0)
            theirs = tl.load(x_scales + group * stride_x_scales, mask=there, other=0.0)
            part *= mine * theirs[None, :]
        sums += part
    total = tl.sum(sums, 1)
    if SIZE == 0:
        total *= tl.load(scales + row) * tl.load(x_scales)
    return total


@triton.jit(do_not_specialize=["stride_x_scales"])
def _gate_up(
    x,
    x_scales,
    experts,
    weight,
    scales,
    middle,
    FIRST: tl.constexpr,
    COUNT: tl.constexpr,
    TOP_K: tl.constexpr,
    K,
    N,
    stride_x_scales,
    stride_scales,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SIZE: tl.constexpr,
    EVEN: tl.constexpr,
    ACTIVATION: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """``middle [T k, N / 2]`` of a pair of a token and one of its experts."""
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    pair = tl.program_id(1)
    expert = tl.load(experts + pair).to(tl.int64) - FIRST
    if (expert < 0) | (expert >= COUNT):
        return
    row = weight_rows(N, BLOCK_N, True)
    token = (pair // TOP_K).to(tl.int64)
    total = _by_row(
        x + token * K,
        x_scales + token,
        weight + expert * N * K,
        scales + expert * stride_scales,
        row,
        K,
        stride_x_scales,
        BLOCK_N,
        BLOCK_K,
        SIZE,
        EVEN,
    )
    middle += pair.to(tl.int64) * (N // 2)
    finish(total[None, :], None, None, None, None, middle, row, tl.arange(0, 1), 1, N, 1, BLOCK_N, ACTIVATION)


@triton.jit(do_not_specialize=["stride_x_scales"])
def _down(
    x,
    x_scales,
    weights,
    experts,
    weight,
    scales,
    y,
    FIRST: tl.constexpr,
    COUNT: tl.constexpr,
    TOP_K: tl.constexpr,
    K,
    N,
    stride_x_scales,
    stride_scales,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SIZE: tl.constexpr,
    EVEN: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Some of ``y [T, N]`` of one token: the sum over its experts has one order always."""
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    token = tl.program_id(1).to(tl.int64)
    row = weight_rows(N, BLOCK_N, False)
    total = tl.zeros([BLOCK_N], tl.float32)
    for place in tl.static_range(TOP_K):
        pair = token * TOP_K + place
        expert = tl.load(experts + pair).to(tl.int64) - FIRST
        if (expert >= 0) & (expert < COUNT):
            answer = _by_row(
                x + pair * K,
                x_scales + pair,
                weight + expert * N * K,
                scales + expert * stride_scales,
                row,
                K,
                stride_x_scales,
                BLOCK_N,
                BLOCK_K,
                SIZE,
                EVEN,
            )
            total += tl.load(weights + pair) * answer
    out = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    tl.store(y + token * N + out, total.to(y.dtype.element_ty), mask=out < N)


def _columns(size: int, block: int) -> dict[str, int | bool]:
    """What a program takes of a row at a time, and the blocks of the weight's scales."""
    columns = min(1024, max(block, 16, triton.next_power_of_2(size)))
    return {"BLOCK_K": columns, "SIZE": block, "EVEN": size % columns == 0}


def gate_up_of_pairs(
    x: torch.Tensor,
    x_scales: torch.Tensor,
    experts: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    held: Held,
    *,
    block: int,
    activation: int,
    overlap: bool,
    dtype: torch.dtype,
) -> torch.Tensor:
    """``act(gate x) * (up x)`` of each token and each of its experts.

    Args:
        x: ``[T, H]`` in a form of e4m3.
        x_scales: float32 ``[groups, T]``, as :func:`atom_core.kernels.fp8_block_linear.quantize.quantize_groups`
            has them.
        experts: int32 ``[T, k]``.
        weight: ``[E, 2I, H]`` in the same form.
        scales: see :mod:`atom_core.kernels.fp8_experts`.
        held: this rank's experts.
        block: rows and columns that have one scale; 0: each row has one.
        activation: one of ``ACTIVATIONS``' numbers.
        overlap: see :func:`atom_core.kernels.triton_support.overlaps`.
        dtype: of the result.

    Returns:
        ``[T k, I]``; what is there for experts that are not held means nothing.
    """
    tokens, hidden = x.shape
    rows, pairs = weight.shape[1], tokens * held.top_k
    middle = torch.empty(pairs, rows // 2, dtype=dtype, device=x.device)
    _gate_up[(triton.cdiv(rows // 2, 4), pairs)](
        x,
        x_scales,
        experts,
        weight,
        scales,
        middle,
        FIRST=held.first,
        COUNT=held.count,
        TOP_K=held.top_k,
        K=hidden,
        N=rows,
        stride_x_scales=tokens,
        stride_scales=scales[0].numel(),
        BLOCK_N=8,
        ACTIVATION=activation,
        OVERLAP=overlap,
        num_warps=4,
        **_columns(hidden, block),
        **launch_options(overlap),
    )
    return middle


def down_of_tokens(
    x: torch.Tensor,
    x_scales: torch.Tensor,
    weights: torch.Tensor,
    experts: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    held: Held,
    *,
    block: int,
    overlap: bool,
    dtype: torch.dtype,
) -> torch.Tensor:
    """``[T, H]``, the weighted sum of down ``x`` over each token's experts.

    ``x``: ``[T k, I]`` in a form of e4m3; ``weights``: float32 ``[T, k]``; ``weight``: ``[E, H, I]``; else as
    :func:`gate_up_of_pairs`.
    """
    (pairs, size), hidden = x.shape, weight.shape[1]
    tokens = pairs // held.top_k
    y = torch.empty(tokens, hidden, dtype=dtype, device=x.device)
    _down[(triton.cdiv(hidden, 8), tokens)](
        x,
        x_scales,
        weights,
        experts,
        weight,
        scales,
        y,
        FIRST=held.first,
        COUNT=held.count,
        TOP_K=held.top_k,
        K=size,
        N=hidden,
        stride_x_scales=pairs,
        stride_scales=scales[0].numel(),
        BLOCK_N=8,
        OVERLAP=overlap,
        num_warps=4,
        **_columns(size, block),
        **launch_options(overlap),
    )
    return y
