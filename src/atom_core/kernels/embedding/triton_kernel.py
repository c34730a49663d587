"""Token embedding in Triton: a program copies a row, or one block of a long row.

It is the first kernel of a step, so it overlaps with no other.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from atom_core.kernels.custom_op import custom_op
from atom_core.kernels.eviction import EVICT_LAST
from atom_core.kernels.launch import entry_kernel
from atom_core.kernels.triton_support import cdiv, next_power_of_2

_BLOCK = 2048


@entry_kernel
@triton.jit
def _embedding(ids, weight, out, first, rows, stride_weight, N, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(ids + token).to(tl.int64) - first
    inside = tl.where((row >= 0) & (row < rows), columns < N, False)
    found = tl.load(weight + row * stride_weight + columns, mask=inside, other=0.0)
    tl.store(out + token * N + columns, found, mask=columns < N, eviction_policy=EVICT_LAST)


def _fake(ids: torch.Tensor, weight: torch.Tensor, first: int | None) -> torch.Tensor:
    return weight.new_empty(ids.shape[0], weight.shape[1])


@custom_op("embedding", _fake)
def embedding(ids: torch.Tensor, weight: torch.Tensor, first: int | None) -> torch.Tensor:
    """See :mod:`atom_core.kernels.embedding`; ids outside a whole vocabulary give zeros too."""
    num_tokens, (rows, size) = ids.shape[0], weight.shape
    assert weight.stride(1) == 1
    ids = ids.contiguous()
    out = weight.new_empty(num_tokens, size)
    if num_tokens:
        grid = (num_tokens, cdiv(size, _BLOCK))
        block = min(_BLOCK, next_power_of_2(size))
        _embedding[grid](ids, weight, out, first or 0, rows, weight.stride(0), size, BLOCK=block, num_warps=4)
    return out
