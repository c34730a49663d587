"""2 to 64 rows by a weight: rows are the right operand of the matrix product, whose instructions take few columns."""

from __future__ import annotations

import triton
import triton.language as tl

from atom_core.kernels.launch import entry_kernel
from atom_core.kernels.linear.helpers import finish, weight_rows

#: Bytes of an L2 cache line, and the number of lines of each weight row that are prefetched before the input is ready.
#: The pipelined loop of this kernel cannot load its first tiles by then.
LINE, FETCHED = 128, 4


@triton.jit
def _fetch(at):
    """Prefetch the lines at these addresses into the L2 cache."""
    tl.inline_asm_elementwise(
        "{ prefetch.global.L2 [$1]; mov.u32 $0, 0; }", "=r,l", [at], dtype=tl.int32, is_pure=False, pack=1
    )


@entry_kernel
@triton.jit(do_not_specialize=["M"])
def few_rows(
    x,
    input_scales,
    norm,
    weight,
    scales,
    bias,
    residual,
    y,
    eps,
    M,
    N,
    K,
    stride_x,
    stride_weight,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN: tl.constexpr,
    ACTIVATION: tl.constexpr,
    OVERLAP: tl.constexpr,
    EARLY: tl.constexpr,
    STAGES: tl.constexpr,
    FETCH: tl.constexpr,
    LINE: tl.constexpr,
):
    """A program has ``BLOCK_N`` weight rows and all rows of ``x``."""
    tl.static_assert(norm is None)
    if OVERLAP and EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    row = weight_rows(N, BLOCK_N, ACTIVATION is not None)
    column = tl.arange(0, BLOCK_K)
    given = tl.arange(0, BLOCK_M)
    at = weight + row[:, None] * stride_weight + column[None, :]
    x_at = x + given.to(tl.int64)[None, :] * stride_x + column[:, None]
    used = given[None, :] < M
    total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    if OVERLAP:
        if FETCH > 0:
            line = tl.arange(0, FETCH) * (LINE * 8 // weight.dtype.element_ty.primitive_bitwidth)
            _fetch(weight + row[:, None] * stride_weight + line[None, :])
        tl.extra.cuda.gdc_wait()
    for begin in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        if EVEN:
            tile = tl.load(at + begin, eviction_policy="evict_first")
            right = tl.load(x_at + begin, mask=used, other=0.0)
        else:
            known = begin + column < K
            tile = tl.load(at + begin, mask=known[None, :], other=0.0, eviction_policy="evict_first")
            right = tl.load(x_at + begin, mask=used & known[:, None], other=0.0)
        total = tl.dot(tile, right, total)
    if OVERLAP and not EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    finish(tl.trans(total), input_scales, scales, bias, residual, y, row, given, M, N, BLOCK_M, BLOCK_N, ACTIVATION)
