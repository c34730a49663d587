"""A product for each head in Triton: a program computes some outputs of some tokens for one head.

For few tokens the time is that of reading the weights, so tiles are narrow and many; for more, a tile of tokens reads
the weights once. The programs of the first outputs copy the rest of ``x``.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from atom_core.batch import BatchShape
from atom_core.kernels.eviction import eviction_policy
from atom_core.kernels.launch import entry_kernel
from atom_core.kernels.triton_support import cdiv, launch_options, next_power_of_2

if TYPE_CHECKING:
    from atom_core.kernels.head_linear import HeadLinearSpec

#: Tokens and outputs of a tile, for few tokens and for many.
_FEW, _MANY, _FEW_OUTPUTS, _MANY_OUTPUTS = 16, 64, 32, 64
#: Inputs per step for many tokens; for few tokens a whole latent, with fewer outputs per program.
_MANY_INPUTS, _ALL_INPUTS, _FEWER_OUTPUTS = 64, 512, 16
#: Measured on Hopper in 16 bits: with up to this many inputs, many tokens take all inputs in one step, with twice the
#: outputs per program; with more inputs and many heads, and so enough programs, this many per step.
_AT_ONCE = 128
#: Largest number of heads whose weights may be read from the L2 cache again for each few of up to 64 tokens.
_FEW_HEADS = 32


def _tile(num_tokens: int, heads: int, in_features: int, itemsize: int, overlap: bool) -> tuple[int, int, int, int]:
    """Tokens, outputs, inputs per step, and warps."""
    padded = max(16, next_power_of_2(in_features))
    if num_tokens > (_MANY if heads <= _FEW_HEADS else _FEW):
        if not overlap or itemsize > 2:
            return _MANY, _MANY_OUTPUTS, _MANY_INPUTS, 4
        if padded <= _AT_ONCE or heads > _FEW_HEADS:
            return _MANY, 2 * _MANY_OUTPUTS, min(padded, _AT_ONCE), 8
        return _MANY, _MANY_OUTPUTS, min(padded, _ALL_INPUTS), 8
    inputs = min(_ALL_INPUTS * 2 // itemsize, padded)
    return _FEW, _FEW_OUTPUTS if inputs <= 2 * _MANY_INPUTS else _FEWER_OUTPUTS, inputs, 4


@entry_kernel
@triton.jit(do_not_specialize=["num_tokens"])
def _head_linear(
    x,
    weight,
    out,
    num_tokens,
    stride_x_token,
    stride_x_head,
    stride_w_head,
    stride_w_in,
    stride_w_out,
    stride_o_token,
    stride_o_head,
    K: tl.constexpr,
    N: tl.constexpr,
    C: tl.constexpr,
    C_PADDED: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    POLICY: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    head = tl.program_id(1).to(tl.int64)
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    column = tl.program_id(2) * BLOCK_N + tl.arange(0, BLOCK_N)
    taken = token < num_tokens
    source = x + token.to(tl.int64)[:, None] * stride_x_token + head * stride_x_head
    target = out + token.to(tl.int64)[:, None] * stride_o_token + head * stride_o_head
    weights = weight + head * stride_w_head + column.to(tl.int64)[None, :] * stride_w_out
    row = tl.arange(0, BLOCK_K)
    wanted = (row < K)[:, None] & (column < N)[None, :]
    if BLOCK_K >= K:  # all inputs in one step, loaded before the previous kernel ends
        b = tl.load(weights + row.to(tl.int64)[:, None] * stride_w_in, mask=wanted, other=0.0)
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    if BLOCK_K >= K:
        a = tl.load(source + row[None, :], mask=taken[:, None] & (row < K)[None, :], other=0.0)
        acc = tl.dot(a, b, input_precision="ieee")
    else:
        acc = tl.zeros([BLOCK_T, BLOCK_N], tl.float32)
        for begin in tl.range(0, K, BLOCK_K):
            row = begin + tl.arange(0, BLOCK_K)
            a = tl.load(source + row[None, :], mask=taken[:, None] & (row < K)[None, :], other=0.0)
            wanted = (row < K)[:, None] & (column < N)[None, :]
            b = tl.load(weights + row.to(tl.int64)[:, None] * stride_w_in, mask=wanted, other=0.0)
            acc = tl.dot(a, b, acc, input_precision="ieee")
    tl.store(
        target + column[None, :],
        acc.to(out.dtype.element_ty),
        mask=taken[:, None] & (column < N)[None, :],
        eviction_policy=POLICY,
    )
    if C > 0:  # noqa: SIM102 - known at compile time, unlike the next
        if tl.program_id(2) == 0:
            carried = tl.arange(0, C_PADDED)
            used = taken[:, None] & (carried < C)[None, :]
            tl.store(
                target + N + carried[None, :],
                tl.load(source + K + carried[None, :], mask=used),
                mask=used,
                eviction_policy=POLICY,
            )


class TritonHeadLinear:
    """See :mod:`atom_core.kernels.head_linear`; ``overlap``: see :func:`triton_support.overlaps`."""

    def __init__(self, spec: HeadLinearSpec, overlap: bool) -> None:
        self.spec, self.overlap = spec, overlap

    def attention_compile_keys(self, shape: BatchShape, device: torch.device) -> Iterator[Hashable]:
        """See :class:`atom_core.kernels.compile_keys.AttentionCompileKeys`."""
        spec = self.spec
        yield _tile(shape.num_tokens, spec.num_heads, spec.in_features, spec.dtype.itemsize, self.overlap)

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
        """Launch it."""
        head_linear(x, weight, out, overlap=self.overlap)


def head_linear(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, *, overlap: bool = False) -> None:
    """See :mod:`atom_core.kernels.head_linear`; ``overlap``: see :func:`triton_support.overlaps`."""
    heads, in_features, out_features = weight.shape
    num_tokens, carried = x.shape[0], x.shape[2] - in_features
    assert x.stride(-1) == out.stride(-1) == 1
    assert 1 in weight.stride()[1:]
    if not num_tokens:
        return
    block_t, block_n, block_k, warps = _tile(num_tokens, heads, in_features, x.itemsize, overlap)
    _head_linear[cdiv(num_tokens, block_t), heads, cdiv(out_features, block_n)](
        x,
        weight,
        out,
        num_tokens,
        *x.stride()[:2],
        *weight.stride(),
        *out.stride()[:2],
        K=in_features,
        N=out_features,
        C=carried,
        C_PADDED=next_power_of_2(max(carried, 1)),
        BLOCK_T=block_t,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        POLICY=eviction_policy(heads),
        OVERLAP=overlap,
        num_warps=warps,
        **launch_options(overlap),
    )
