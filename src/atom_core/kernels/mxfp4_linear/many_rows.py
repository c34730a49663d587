"""More than 64 rows by a weight in MXFP4: tiles of both operands; halves of bytes as in :mod:`.few_rows`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from atom_core.kernels.launch import entry_kernel
from atom_core.kernels.mxfp4_linear.conversion import number, scale_of
from atom_core.kernels.triton_support import cdiv


@entry_kernel
@triton.jit(do_not_specialize=["M"])
def _many_rows(
    x,
    blocks,
    scales,
    bias,
    y,
    M,
    N,
    K,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BYTES: tl.constexpr,
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
    byte = tl.arange(0, BYTES)
    half = K // 2
    used, wanted = (row < M)[:, None], (out < N)[None, :]
    x_at = x + row[:, None] * K + byte[None, :]
    at = blocks + out[None, :] * half + byte[:, None]
    scale_at = scales + out[None, :] * (K // 32) + (byte // 16)[:, None]
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for begin in tl.range(0, half, BYTES, num_stages=STAGES):
        if EVEN:
            even = tl.load(x_at + begin, mask=used, other=0.0)
            odd = tl.load(x_at + half + begin, mask=used, other=0.0)
            packed = tl.load(at + begin, mask=wanted, other=0).to(tl.int32)
            each = scale_of(tl.load(scale_at + begin // 16, mask=wanted, other=0))
        else:
            known = begin + byte < half
            even = tl.load(x_at + begin, mask=used & known[None, :], other=0.0)
            odd = tl.load(x_at + half + begin, mask=used & known[None, :], other=0.0)
            packed = tl.load(at + begin, mask=wanted & known[:, None], other=0).to(tl.int32)
            each = scale_of(tl.load(scale_at + begin // 16, mask=wanted & known[:, None], other=0))
        lower = (number(packed & 15) * each).to(even.dtype)
        upper = (number(packed >> 4) * each).to(even.dtype)
        total = tl.dot(even, lower, total, input_precision="ieee")
        total = tl.dot(odd, upper, total, input_precision="ieee")
    if bias is not None:
        total += tl.load(bias + out, mask=out < N, other=0.0).to(tl.float32)[None, :]
    tl.store(y + row[:, None] * N + out[None, :], total.to(y.dtype.element_ty), mask=used & wanted)


def tile_for(num_rows: int, nvidia: bool) -> tuple[int, int]:
    """Rows of the input and of the weight that a program takes.

    Fewer rows have smaller tiles, so that there are programs for the whole GPU.
    """
    return 64 if num_rows <= 128 else 128, 64 if num_rows <= 512 or not nvidia else 128


def multiply_many_rows(
    x: torch.Tensor, blocks: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None, *, nvidia: bool
) -> torch.Tensor:
    """``x W^T + b``; the arguments are those of :func:`.few_rows.multiply_few_rows`."""
    (num_rows, in_features), out_features = x.shape, len(blocks)
    assert all(it.is_contiguous() for it in (x, blocks, scales))
    y = x.new_empty(num_rows, out_features)
    block_rows, block = tile_for(num_rows, nvidia)
    columns = 32
    _many_rows[(cdiv(num_rows, block_rows) * cdiv(out_features, block),)](
        x,
        blocks,
        scales,
        bias,
        y,
        num_rows,
        out_features,
        in_features,
        BLOCK_M=block_rows,
        BLOCK_N=block,
        BYTES=columns,
        TOGETHER=8,
        EVEN=in_features // 2 % columns == 0,
        STAGES=3 if nvidia else 2,
        num_warps=8 if block_rows * block > 64 * 64 else 4,
    )
    return y
