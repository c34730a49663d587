"""1 to 64 rows by a weight in MXFP4, which is read once: rows are the right operand of the product, as in
:mod:`atom_core.kernels.linear.few_rows`. Lower halves of bytes are multiplied by the even elements of a row, upper
halves by the odd ones, so no tile needs reordering.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from atom_core.kernels.gated_activation.triton_kernel import ACTIVATIONS
from atom_core.kernels.launch import entry_kernel
from atom_core.kernels.linear.helpers import finish, weight_rows
from atom_core.kernels.linear.tiles import MAX_ROWS
from atom_core.kernels.mxfp4_linear.conversion import number, scale_of
from atom_core.kernels.triton_support import cdiv, launch_options, next_power_of_2
from atom_core.types import Activation


@entry_kernel
@triton.jit(do_not_specialize=["M"])
def _few_rows(
    x,
    blocks,
    scales,
    bias,
    residual,
    y,
    M,
    N,
    K,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BYTES: tl.constexpr,
    EVEN: tl.constexpr,
    ACTIVATION: tl.constexpr,
    OVERLAP: tl.constexpr,
    STAGES: tl.constexpr,
):
    """A program has ``BLOCK_N`` weight rows and all rows of ``x``."""
    row = weight_rows(N, BLOCK_N, ACTIVATION is not None)
    byte = tl.arange(0, BYTES)
    given = tl.arange(0, BLOCK_M)
    half = K // 2
    at = blocks + row[:, None] * half + byte[None, :]
    scale_at = scales + row[:, None] * (K // 32) + (byte // 16)[None, :]
    x_at = x + given.to(tl.int64)[None, :] * K + byte[:, None]
    used = (given < M)[None, :]
    total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    for begin in tl.range(0, half, BYTES, num_stages=STAGES):
        if EVEN:
            packed = tl.load(at + begin, eviction_policy="evict_first").to(tl.int32)
            each = scale_of(tl.load(scale_at + begin // 16))
            even = tl.load(x_at + begin, mask=used, other=0.0)
            odd = tl.load(x_at + half + begin, mask=used, other=0.0)
        else:
            known = begin + byte < half
            packed = tl.load(at + begin, mask=known[None, :], other=0, eviction_policy="evict_first").to(tl.int32)
            each = scale_of(tl.load(scale_at + begin // 16, mask=known[None, :], other=0))
            even = tl.load(x_at + begin, mask=used & known[:, None], other=0.0)
            odd = tl.load(x_at + half + begin, mask=used & known[:, None], other=0.0)
        lower = (number(packed & 15) * each).to(even.dtype)
        upper = (number(packed >> 4) * each).to(even.dtype)
        total = tl.dot(lower, even, total, input_precision="ieee")
        total = tl.dot(upper, odd, total, input_precision="ieee")
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
    finish(tl.trans(total), None, None, bias, residual, y, row, given, M, N, BLOCK_M, BLOCK_N, ACTIVATION)


def input_rows(num_rows: int) -> int:
    """Rows of the input that one program takes, of ``num_rows``."""
    return int(max(16, next_power_of_2(num_rows)))


def multiply_few_rows(
    x: torch.Tensor,
    blocks: torch.Tensor,
    scales: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    nvidia: bool,
    overlap: bool,
    activation: Activation | None = None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """``act(x W^T + b) + residual`` for 1 to :data:`MAX_ROWS` rows.

    Args:
        x: ``[M, K]``, reordered by :func:`.inputs.prepare`.
        blocks: uint8 ``[N, K / 2]``, contiguous.
        scales: uint8 ``[N, K / 32]``, contiguous.
        bias: ``[N]``.
        nvidia: whether the device is NVIDIA's; others have less shared memory.
        overlap: see :func:`atom_core.kernels.triton_support.overlaps`.
        activation: the weight is ``[gate | up]``; the result is ``[M, N / 2]``.
        residual: contiguous, of the result's shape; it is added to and returned.
    """
    (num_rows, in_features), out_features = x.shape, len(blocks)
    assert 0 < num_rows <= MAX_ROWS
    assert all(it.is_contiguous() for it in (x, blocks, scales))
    assert residual is None or residual.is_contiguous()
    outputs = out_features if activation is None else out_features // 2
    y = x.new_empty(num_rows, outputs) if residual is None else residual
    block_rows = input_rows(num_rows)
    block, columns = (64, 128 if x.element_size() == 2 else 64) if nvidia else (32, 64)
    _few_rows[(cdiv(outputs, block if activation is None else block // 2),)](
        x,
        blocks,
        scales,
        bias,
        residual,
        y,
        num_rows,
        out_features,
        in_features,
        BLOCK_M=block_rows,
        BLOCK_N=block,
        BYTES=columns,
        EVEN=in_features // 2 % columns == 0,
        ACTIVATION=None if activation is None else ACTIVATIONS[activation],
        OVERLAP=overlap,
        STAGES=4 if nvidia else 2,
        num_warps=4,
        **launch_options(overlap),
    )
    return y
