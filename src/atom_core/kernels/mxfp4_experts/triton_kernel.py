"""Experts in MXFP4 in Triton, few tokens and many as :mod:`atom_core.kernels.experts` has them.

Few tokens: a program takes some rows of one expert's weight for one token. A group of 32 numbers is 16 bytes: their
lower halves are multiplied by the even numbers of ``x``, the upper ones by the odd, and the scale enters once for all.
Many tokens: tiles of the weight become numbers of ``x``'s dtype, for the tensor cores; in bfloat16 all are exact.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch
import triton
import triton.language as tl

from atom_core.config import Activation
from atom_core.kernels.experts.grouped import Held, block_rows, combine, finish_block, sort_by_expert
from atom_core.kernels.gated_activation.triton_kernel import ACTIVATIONS
from atom_core.kernels.linear.parts import finish, weight_rows
from atom_core.kernels.opaque import opaque
from atom_core.kernels.triton_support import launch_options

if TYPE_CHECKING:
    from atom_core.kernels.experts import ExpertsSpec
    from atom_core.kernels.mxfp4_experts import Mxfp4Weights

#: Tokens up to which each is multiplied by itself.
MAX_TOKENS = 16
_GROUP = 32


@triton.jit
def _number(code):
    """What e2m1's four bits stand for, times 2 ** -14, in float32.

    They are the sign, the last two bits of the exponent and the first of the mantissa of a float16, whose exponent
    counts from 14 less: so zero and the subnormal 0.5 come out right too.
    """
    bits = ((code & 8) << 12) | ((code & 7) << 9)
    return bits.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _scale(byte):
    """2 ** (byte - 127 + 14) in float32, which takes back what :func:`_number` is short of; 0 for the byte 0."""
    return (byte.to(tl.int32) << 23).to(tl.float32, bitcast=True) * 16384.0


@triton.jit
def _row_products(x, blocks, scales, row, K, BLOCK_N: tl.constexpr, GROUPS: tl.constexpr):
    """``[BLOCK_N]``: rows of the weight, at ``blocks`` and ``scales``, by the vector ``x [K]``."""
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
        each = _scale(tl.load(scales + row[:, None] * (K // 32) + here[None, :], mask=known[None, :], other=0))
        products = _number(packed & 15) * even[None, :, :] + _number(packed >> 4) * odd[None, :, :]
        total += tl.sum(products, 2) * each
    return tl.sum(total, 1)


@triton.jit
def _gate_up(
    x,
    experts,
    blocks,
    scales,
    bias,
    middle,
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
    """``middle [T k, N / 2]`` of a pair of a token and one of its experts."""
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    pair = tl.program_id(1)
    expert = tl.load(experts + pair).to(tl.int64) - FIRST
    if (expert < 0) | (expert >= COUNT):
        return
    row = weight_rows(N, BLOCK_N, True)
    blocks += expert * N * (K // 2)
    scales += expert * N * (K // 32)
    if bias is not None:
        bias += expert * N
    x += (pair // TOP_K).to(tl.int64) * stride_x
    total = _row_products(x, blocks, scales, row, K, BLOCK_N, GROUPS)
    middle += pair.to(tl.int64) * (N // 2)
    finish(total[None, :], None, None, bias, None, middle, row, tl.arange(0, 1), 1, N, 1, BLOCK_N, ACTIVATION)


@triton.jit
def _down(
    middle,
    weights,
    experts,
    blocks,
    scales,
    bias,
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
    """Some of ``y [T, N]`` of one token."""
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    token = tl.program_id(1)
    row = weight_rows(N, BLOCK_N, False)
    total = tl.zeros([BLOCK_N], tl.float32)
    for place in tl.static_range(TOP_K):
        pair = token * TOP_K + place
        expert = tl.load(experts + pair).to(tl.int64) - FIRST
        if (expert >= 0) & (expert < COUNT):
            answer = _row_products(
                middle + pair.to(tl.int64) * K,
                blocks + expert * N * (K // 2),
                scales + expert * N * (K // 32),
                row,
                K,
                BLOCK_N,
                GROUPS,
            )
            if bias is not None:
                answer += tl.load(bias + expert * N + row).to(tl.float32)
            total += tl.load(weights + pair) * answer
    out = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    tl.store(y + token.to(tl.int64) * N + out, total.to(y.dtype.element_ty), mask=out < N)


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
    """A block of rows of one expert by some rows of its weight; see the same of :mod:`atom_core.kernels.experts`."""
    GATED: tl.constexpr = ACTIVATION is not None
    block = tl.program_id(1)
    expert = tl.load(block_experts + block).to(tl.int64)
    if expert < 0:
        return
    slot = block.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    pair = tl.load(slots + slot).to(tl.int64)
    used = pair >= 0
    row = weight_rows(N, BLOCK_N, GATED)
    column = tl.arange(0, BLOCK_K)
    byte = tl.arange(0, BLOCK_K // 2)
    x_row = pair // TOP_K if GATED else slot
    x_at = x + x_row[:, None] * stride_x + column[None, :]
    at = blocks + (expert * N + row)[:, None] * (K // 2) + byte[None, :]
    scale_at = scales + (expert * N + row)[:, None] * (K // 32) + (byte // 16)[None, :]
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for begin in tl.range(0, K, BLOCK_K):
        left = tl.load(x_at + begin, mask=used[:, None] & (begin + column < K)[None, :], other=0.0)
        known = (begin + 2 * byte < K)[None, :]
        packed = tl.load(at + begin // 2, mask=known, other=0).to(tl.int32)
        each = _scale(tl.load(scale_at + begin // 32, mask=known, other=0))
        pairs = tl.join(_number(packed & 15) * each, _number(packed >> 4) * each)
        right = tl.reshape(pairs, (BLOCK_N, BLOCK_K)).to(left.dtype)
        total = tl.dot(left, tl.trans(right), total, input_precision="ieee")
    finish_block(total, weights, bias, out, expert, pair, slot, used, row, N, BLOCK_M, BLOCK_N, ACTIVATION)


class TritonMxfp4Experts:
    """See the module's text and :mod:`atom_core.kernels.mxfp4_experts`.

    Args:
        spec: the layer.
        overlap: see :func:`atom_core.kernels.triton_support.overlaps`.
    """

    def __init__(self, spec: ExpertsSpec, overlap: bool) -> None:
        self.spec, self.overlap = spec, overlap

    def __call__(
        self, x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor, layer: Mxfp4Weights
    ) -> torch.Tensor:
        """See :class:`atom_core.kernels.mxfp4_experts.Mxfp4ExpertsKernel`."""
        spec = self.spec
        return mixture(x, weights, experts, *layer, spec.first, spec.count, spec.activation, self.overlap)


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
    overlap: bool,
) -> torch.Tensor:
    return torch.empty_like(x)


@opaque("mxfp4_experts", _fake)
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
    overlap: bool,
) -> torch.Tensor:
    """See :mod:`atom_core.kernels.mxfp4_experts`; ``first`` and ``count`` say which experts are held."""
    assert x.stride(1) == 1
    assert all(it.is_contiguous() for it in (weights, experts, gate_up, gate_up_scale, down, down_scale))
    tokens, hidden = x.shape
    size, top_k = 2 * down.shape[2], experts.shape[1]
    assert hidden % _GROUP == size % _GROUP == 0
    act, held = ACTIVATIONS[cast(Activation, activation)], Held(first, count, top_k)
    few = tokens <= MAX_TOKENS
    if not tokens:
        return torch.empty_like(x, memory_format=torch.contiguous_format)
    to_middle = (gate_up, gate_up_scale, gate_up_bias)
    to_answer = (down, down_scale, down_bias)
    if not few:
        return _many_tokens(x, weights, experts, to_middle, to_answer, size, held, act)
    y = torch.empty(tokens, hidden, dtype=x.dtype, device=x.device)
    middle = torch.empty(tokens * top_k, size, dtype=x.dtype, device=x.device)
    constants = {"FIRST": first, "COUNT": count, "TOP_K": top_k, "GROUPS": 32, "OVERLAP": overlap, "num_warps": 4}
    _gate_up[(triton.cdiv(size, 4), tokens * top_k)](
        x,
        experts,
        *to_middle,
        middle,
        K=hidden,
        N=2 * size,
        stride_x=x.stride(0),
        BLOCK_N=8,
        ACTIVATION=act,
        **constants,
        **launch_options(overlap),
    )
    _down[(triton.cdiv(hidden, 8), tokens)](
        middle,
        weights,
        experts,
        *to_answer,
        y,
        K=size,
        N=hidden,
        BLOCK_N=8,
        **constants,
        **launch_options(overlap),
    )
    return y


def _many_tokens(
    x: torch.Tensor,
    weights: torch.Tensor,
    experts: torch.Tensor,
    to_middle: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None],
    to_answer: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None],
    size: int,
    held: Held,
    activation: int,
) -> torch.Tensor:
    tokens, hidden = x.shape
    sorted_pairs = sort_by_expert(experts, held, block_rows(tokens, held))
    num_blocks, rows = len(sorted_pairs.experts), sorted_pairs.rows
    tile = {"TOP_K": held.top_k, "BLOCK_M": rows, "BLOCK_N": 64, "BLOCK_K": 64, "num_warps": 4 if rows < 64 else 8}
    at = (sorted_pairs.slots, sorted_pairs.experts)
    middle = torch.empty(num_blocks * rows, size, dtype=x.dtype, device=x.device)
    _multiply[(triton.cdiv(2 * size, tile["BLOCK_N"]), num_blocks)](
        x, *at, None, *to_middle, middle, hidden, 2 * size, x.stride(0), ACTIVATION=activation, **tile
    )
    answers = torch.empty(tokens * held.top_k, hidden, dtype=x.dtype, device=x.device)
    _multiply[(triton.cdiv(hidden, tile["BLOCK_N"]), num_blocks)](
        middle, *at, weights, *to_answer, answers, size, hidden, size, ACTIVATION=None, **tile
    )
    return combine(answers, experts, held, x.dtype, overlap=False)
