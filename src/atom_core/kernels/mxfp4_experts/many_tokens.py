"""Experts in MXFP4 of many tokens on Hopper: weights of some experts at a time are converted to 16 bits in memory.

A kernel that converts weights in registers does so again for each block of tokens. With many tokens per expert it is
faster to write the converted weights once and read them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from atom_core.kernels.experts.grouped import LocalExperts, block_rows, combine, sort_by_expert
from atom_core.kernels.experts.hopper import multiply_on_hopper
from atom_core.kernels.launch import entry_kernel
from atom_core.kernels.linear.tiles import aligned
from atom_core.kernels.linear.triton_kernel import Norm
from atom_core.kernels.mxfp4_experts.bits import PLACES
from atom_core.kernels.mxfp4_linear.conversion import number, scale_of
from atom_core.kernels.mxfp4_linear.inputs import prepare
from atom_core.kernels.triton_support import cdiv

#: Average of routed tokens per expert from which this is faster than :mod:`.hopper`.
_MIN_ROUTED_TOKENS = 768
#: Bytes of converted weights at a time; this memory is not available for anything else.
_WIDE_BYTES = 256 << 20


@triton.jit
def _number(packed, SIGN: tl.constexpr, SIZE: tl.constexpr):
    """One of the four values of each element."""
    return number(((packed >> SIGN) & 1) * 8 + ((packed >> SIZE) & 7))


@entry_kernel
@triton.jit
def _widen(blocks, scales, wide, N, K, ROWS: tl.constexpr, GROUPS: tl.constexpr, PLACES: tl.constexpr):
    """Convert some rows and groups of one expert's weight, whose bits have the order of :mod:`.bits`."""
    expert = tl.program_id(2).to(tl.int64)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    four = tl.program_id(1) * GROUPS * 8 + tl.arange(0, GROUPS * 8)
    known = (row < N)[:, None] & (four < K // 4)[None, :]
    at = (expert * N + row)[:, None]
    packed = tl.load(blocks + at * (K // 4) + four[None, :], mask=known, other=0).to(tl.int32)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    scale_at = scales + expert * N * (K // 32) + row[:, None] + (group * N)[None, :]
    each = scale_of(tl.load(scale_at, mask=(row < N)[:, None] & (group < K // 32)[None, :], other=0))
    # Join the first with the third values and the second with the fourth, then both.
    odd = tl.join(_number(packed, PLACES[0], PLACES[1]), _number(packed, PLACES[4], PLACES[5]))
    even = tl.join(_number(packed, PLACES[2], PLACES[3]), _number(packed, PLACES[6], PLACES[7]))
    fours = tl.reshape(tl.join(odd, even), (ROWS, GROUPS, 32)) * each[:, :, None]
    column = tl.program_id(1) * GROUPS * 32 + tl.arange(0, GROUPS * 32)
    numbers = tl.reshape(fours, (ROWS, GROUPS * 32)).to(wide.dtype.element_ty)
    tl.store(wide + at * K + column[None, :], numbers, mask=(row < N)[:, None] & (column < K)[None, :])


def widen(blocks: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``[E, N, K]`` in ``dtype`` from ``blocks [E, N, K / 2]``, spread, and ``scales [E, N, K / 32]``, transposed."""
    experts, rows, half = blocks.shape
    wide = torch.empty(experts, rows, 2 * half, dtype=dtype, device=blocks.device)
    grid = (cdiv(rows, 16), cdiv(half, 8 * 16), experts)
    places = tuple(bit for value in PLACES for bit in value)
    _widen[grid](blocks.view(torch.int16), scales, wide, rows, 2 * half, ROWS=16, GROUPS=8, PLACES=places)
    return wide


def pays(tokens: int, local_experts: LocalExperts) -> bool:
    """Whether this file is faster for so many tokens."""
    return tokens * local_experts.top_k >= _MIN_ROUTED_TOKENS * local_experts.count


def takes(x: torch.Tensor, size: int) -> bool:
    """Whether this file supports tokens ``x [T, K]`` and experts of intermediate size ``size``."""
    return aligned(x) and x.shape[1] % 64 == size % 64 == 0


def many_tokens(
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
    """See :func:`atom_core.kernels.mxfp4_experts.triton_kernel.mixture`, which has the same arguments.

    ``x`` is already normed and rounded.
    """
    (tokens, hidden), size = x.shape, 2 * down[0].shape[2]
    sorted_tokens = sort_by_expert(experts, local_experts, block_rows(tokens, local_experts), overlap)
    intermediate = torch.empty(len(sorted_tokens.slots), size, dtype=x.dtype, device=x.device)
    outputs = torch.empty(tokens * local_experts.top_k, hidden, dtype=x.dtype, device=x.device)
    for given, shares, (blocks, scales, bias), out, act in (
        (x, None, gate_up, intermediate, activation),
        (intermediate, weights, down, outputs, None),
    ):
        if act is None and rounded_inputs:
            given = prepare(given, False, rounds=True, planes=1, slots=sorted_tokens.slots)
        each = max(1, _WIDE_BYTES // (4 * blocks[0].numel()))
        for first in range(0, local_experts.count, each):
            some = slice(first, first + each)
            wide = widen(blocks[some], scales[some], x.dtype)
            multiply_on_hopper(
                given,
                None,
                sorted_tokens,
                shares,
                wide,
                None,
                None if bias is None else bias[some],
                out,
                top_k=local_experts.top_k,
                block=0,
                activation=act,
                overlap=overlap,
                first=first,
            )
    return combine(outputs, experts, local_experts, x.dtype, overlap, residual)
