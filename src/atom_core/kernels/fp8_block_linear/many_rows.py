"""More than 64 rows by a weight in blocks: tiles of both operands, a group of K per step."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from atom_core.kernels.launch import entry_kernel
from atom_core.kernels.triton_support import cdiv
from atom_core.quant.fp8 import BLOCK_SIZE


@entry_kernel
@triton.jit(do_not_specialize=["M"])
def _many_rows(
    x,
    input_scales,
    weight,
    scales,
    bias,
    y,
    M,
    N,
    K,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SIZE: tl.constexpr,
    TOGETHER: tl.constexpr,
    EVEN: tl.constexpr,
    STAGES: tl.constexpr,
):
    """A tile of ``y``. ``TOGETHER`` tiles of rows are adjacent in launch order, which reuses the L2 cache."""
    program = tl.program_id(0)
    across = tl.cdiv(N, BLOCK_N)
    first = program // (TOGETHER * across) * TOGETHER
    height = tl.minimum(tl.cdiv(M, BLOCK_M) - first, TOGETHER)
    within = program % (TOGETHER * across)
    row = (first + within % height).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    out = (within // height).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    column = tl.arange(0, SIZE)
    used, wanted = row < M, out < N
    x_at = x + row[:, None] * K + column[None, :]
    at = weight + out[None, :] * K + column[:, None]
    scale_at = scales + out // SIZE * tl.cdiv(K, SIZE)
    height_of_x = M.to(tl.int64)
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for begin in tl.range(0, K, SIZE, num_stages=STAGES):
        if EVEN:
            left = tl.load(x_at + begin, mask=used[:, None], other=0.0)
            right = tl.load(at + begin, mask=wanted[None, :], other=0.0)
        else:
            known = begin + column < K
            left = tl.load(x_at + begin, mask=used[:, None] & known[None, :], other=0.0)
            right = tl.load(at + begin, mask=wanted[None, :] & known[:, None], other=0.0)
        group = begin // SIZE
        theirs = tl.load(input_scales + group * height_of_x + row, mask=used, other=0.0)
        mine = tl.load(scale_at + group, mask=wanted, other=0.0)
        total += tl.dot(left, right) * theirs[:, None] * mine[None, :]
    if bias is not None:
        total += tl.load(bias + out, mask=wanted, other=0.0).to(tl.float32)[None, :]
    tl.store(y + row[:, None] * N + out[None, :], total.to(y.dtype.element_ty), mask=used[:, None] & wanted[None, :])


def tile_for(num_rows: int, even: bool, nvidia: bool) -> tuple[int, int]:
    """Rows of the input and of the weight that a program takes; ``even``: whether inputs are whole blocks.

    Fewer rows have smaller tiles, so that there are programs for the whole GPU.
    """
    block_rows = 64 if num_rows <= 128 or not (nvidia or even) else 128  # 128 with masks spill registers on AMD
    return block_rows, 64 if num_rows <= 512 or not nvidia else 128


def multiply_many_rows(
    x: torch.Tensor,
    input_scales: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    nvidia: bool,
    dtype: torch.dtype,
) -> torch.Tensor:
    """``x W^T + b``; the arguments are those of :func:`.few_rows.multiply_few_rows`."""
    num_rows, (out_features, in_features) = len(x), weight.shape
    assert x.dtype == weight.dtype
    assert all(it.is_contiguous() for it in (x, input_scales, weight, scales))
    y = x.new_empty(num_rows, out_features, dtype=dtype)
    even = in_features % BLOCK_SIZE == 0
    block_rows, block = tile_for(num_rows, even, nvidia)
    _many_rows[(cdiv(num_rows, block_rows) * cdiv(out_features, block),)](
        x,
        input_scales,
        weight,
        scales,
        bias,
        y,
        num_rows,
        out_features,
        in_features,
        BLOCK_M=block_rows,
        BLOCK_N=block,
        SIZE=BLOCK_SIZE,
        TOGETHER=8,
        EVEN=even,
        STAGES=3 if nvidia else 2,
        num_warps=8 if block_rows * block > 64 * 64 else 4,
    )
    return y
