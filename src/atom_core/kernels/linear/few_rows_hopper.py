"""1 to 256 rows by a weight on Hopper, in Gluon: weight tiles are loaded before the input is ready.

Triton's own pipeline loads both operands' tiles together, and so none before the input is ready. This kernel starts to
copy the first weight tiles, waits for the previous kernel, then copies the input's tiles; ``wgmma`` reads both from
shared memory. For a small weight, a program may have only some of the input rows, so that there are enough programs.
For few input rows, a program may have fewer weight rows than ``wgmma`` multiplies at once. Then each row is split along
K, and the splits of all rows fill the tile, for the weight and the input alike. Of the products of all splits, only
those of corresponding splits are summed.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma, warpgroup_mma, warpgroup_mma_wait

from atom_core.kernels.eviction import EVICT_LAST
from atom_core.kernels.gated_activation.triton_kernel import gated
from atom_core.kernels.launch import entry_kernel

#: Gluon renamed these between Triton 3.6 and 3.9.
load = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
load_tile = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
barrier = getattr(gl, "barrier", None) or gl.thread_barrier
_gated = gluon.jit(gated.fn)

#: A tile's stage is reused once the product after the one that read it has started.
LAG = 2


@gluon.jit
def rows_of_tile(tile, lane, N, BLOCK_N: gl.constexpr, GATED: gl.constexpr):
    """As :func:`atom_core.kernels.linear.helpers.weight_rows`, but of 16 rows the first eight are gate, the others up.

    A thread has every eighth row of the result, and so both. ``tile``: which of the weight's.
    """
    if GATED:
        half = N // 2
        row = tile * (BLOCK_N // 2) + lane // 16 * 8 + lane % 8
        row = gl.minimum(row, half - 1) + lane // 8 % 2 * half
    else:
        row = gl.minimum(tile * BLOCK_N + lane, N - 1)
    return row.to(gl.int64)


@gluon.jit
def weight_rows(lane, N, BLOCK_N: gl.constexpr, GATED: gl.constexpr):
    """:func:`rows_of_tile` of a program with one tile."""
    return rows_of_tile(gl.program_id(0), lane, N, BLOCK_N, GATED)


@gluon.jit
def depend(INSTRUCTION: gl.constexpr):
    """Execute an instruction of programmatic dependent launch."""
    gl.inline_asm_elementwise(INSTRUCTION, "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def ready(LATER: gl.constexpr):
    """Wait until all but the last ``LATER`` copy groups are in shared memory, for all warps and for ``wgmma``."""
    async_copy.wait_group(LATER)
    barrier()  # directly behind the wait, or Triton adds one of its own
    fence_async_shared()


@gluon.jit
def all_copied():
    """Wait for all copies of this thread; masked ones past the last tile write zeros.

    They must end before shared memory is reused.
    """
    async_copy.wait_group(0)


@gluon.jit
def activated(total, BLOCK_N: gl.constexpr, BLOCK_M: gl.constexpr, ACTIVATION: gl.constexpr, out_dtype: gl.constexpr):
    """``[BLOCK_N / 2, BLOCK_M]`` from sums whose rows are those of :func:`weight_rows`."""
    gate, up = gl.split(total.reshape([BLOCK_N // 16, 2, 8, BLOCK_M]).permute([0, 2, 3, 1]))
    # Rounded as if the activation were a kernel of its own.
    gate = gate.to(out_dtype).to(gl.float32)
    up = up.to(out_dtype).to(gl.float32)
    return _gated(gate, up, ACTIVATION).reshape([BLOCK_N // 2, BLOCK_M])


@gluon.jit
def finish(
    total,
    of_sum,
    bias,
    residual,
    y,
    M,
    N,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    ACTIVATION: gl.constexpr,
    WIDE: gl.constexpr,
):
    """Add bias and residual to ``total [BLOCK_N, BLOCK_M]`` of weight rows ``of_sum``, activate it and store it.

    ``WIDE``: a thread stores eight weight rows together.
    """
    out_dtype: gl.constexpr = y.dtype.element_ty
    warps: gl.constexpr = gl.num_warps()
    if bias is not None:
        total += gl.load(bias + of_sum).to(gl.float32)[:, None]
    width = N
    WIDTH: gl.constexpr = BLOCK_N if ACTIVATION is None else BLOCK_N // 2
    if ACTIVATION is not None:
        width = N // 2
        total = activated(total, BLOCK_N, BLOCK_M, ACTIVATION, out_dtype)
    vector: gl.constexpr = 8 if WIDE else 1
    across: gl.constexpr = min(32, WIDTH // vector)
    stored: gl.constexpr = gl.BlockedLayout([vector, 1], [across, 32 // across], [1, warps], [0, 1])
    result = gl.convert_layout(total, stored)
    out = gl.program_id(0) * WIDTH + gl.arange(0, WIDTH, gl.SliceLayout(1, stored))
    to = gl.program_id(1) * BLOCK_M + gl.arange(0, BLOCK_M, gl.SliceLayout(0, stored))
    y_at = to.to(gl.int64)[None, :] * width + out[:, None]
    known = (to < M)[None, :] & (out < width)[:, None]
    if residual is not None:
        result += gl.load(residual + y_at, mask=known, other=0.0).to(gl.float32)
    gl.store(y + y_at, result.to(out_dtype), mask=known, eviction_policy=EVICT_LAST)


@gluon.jit
def sum_of_splits(total, BLOCK_N: gl.constexpr, BLOCK_M: gl.constexpr, SPLIT: gl.constexpr, layout: gl.constexpr):
    """``[BLOCK_N, BLOCK_M]``: the sum of the products of corresponding splits, out of those of all splits."""
    of_row = gl.arange(0, BLOCK_N * SPLIT, gl.SliceLayout(1, layout)) // BLOCK_N
    of_input = gl.arange(0, BLOCK_M * SPLIT, gl.SliceLayout(0, layout)) // BLOCK_M
    # Not a factor of 0: products of different splits may overflow.
    total = gl.where(of_row[:, None] == of_input[None, :], total, 0.0)
    return gl.sum(gl.sum(total.reshape([SPLIT, BLOCK_N, SPLIT, BLOCK_M]), 2), 0)


@entry_kernel
@gluon.jit(do_not_specialize=["M"])
def few_rows_hopper(
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
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    EVEN: gl.constexpr,
    ACTIVATION: gl.constexpr,
    OVERLAP: gl.constexpr,
    EARLY: gl.constexpr,
    STAGES: gl.constexpr,
    LAG: gl.constexpr,
    SPLIT_INPUT: gl.constexpr,
    SPLIT: gl.constexpr,
):
    """A program has ``BLOCK_N`` weight rows and ``BLOCK_M`` rows of ``x``: all of them, unless ``SPLIT_INPUT``.

    ``STAGES - LAG`` tiles are copied ahead, each with columns of all ``SPLIT`` splits of its rows.
    """
    gl.static_assert(norm is None)
    gl.static_assert(EVEN)
    gl.static_assert(SPLIT == 1 or ACTIVATION is None)
    dtype: gl.constexpr = weight.dtype.element_ty
    bits: gl.constexpr = dtype.primitive_bitwidth
    vector: gl.constexpr = 128 // bits
    across: gl.constexpr = min(BLOCK_K // vector, 32)
    warps: gl.constexpr = gl.num_warps()
    copied: gl.constexpr = gl.BlockedLayout([1, vector], [32 // across, across], [warps, 1], [1, 0])
    ROWS: gl.constexpr = BLOCK_N * SPLIT
    INPUTS: gl.constexpr = BLOCK_M * SPLIT
    summed: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, INPUTS, 256 // bits])
    ahead: gl.constexpr = STAGES - LAG
    policy: gl.constexpr = "" if SPLIT_INPUT else "evict_first"  # other programs read them too
    if OVERLAP and EARLY:
        depend("griddepcontrol.launch_dependents; // $0")
    tiles = gl.allocate_shared_memory(
        dtype, [STAGES, ROWS, BLOCK_K], gl.NVMMASharedLayout.get_default_for([ROWS, BLOCK_K], dtype)
    )
    inputs = gl.allocate_shared_memory(
        dtype, [STAGES, INPUTS, BLOCK_K], gl.NVMMASharedLayout.get_default_for([INPUTS, BLOCK_K], dtype)
    )
    steps = K // (SPLIT * BLOCK_K)
    share = steps * BLOCK_K
    column = gl.arange(0, BLOCK_K, gl.SliceLayout(0, copied))
    lane = gl.arange(0, ROWS, gl.SliceLayout(1, copied))
    row = weight_rows(lane % BLOCK_N, N, BLOCK_N, ACTIVATION is not None)
    at = weight + (row * stride_weight + lane // BLOCK_N * share)[:, None] + column[None, :]
    place_of = gl.arange(0, INPUTS, gl.SliceLayout(1, copied))
    given = gl.program_id(1) * BLOCK_M + place_of % BLOCK_M
    used = (given < M)[:, None]
    x_at = x + (given.to(gl.int64) * stride_x + place_of // BLOCK_M * share)[:, None] + column[None, :]
    for stage in gl.static_range(ahead):
        load(tiles.index(stage), at + stage * BLOCK_K, eviction_policy=policy)
        async_copy.commit_group()
    if OVERLAP:
        depend("griddepcontrol.wait; // $0")
    for stage in gl.static_range(ahead):
        load(inputs.index(stage), x_at + stage * BLOCK_K, mask=used)
        async_copy.commit_group()
    total = gl.zeros([ROWS, INPUTS], gl.float32, summed)
    place = 0
    filled = ahead
    for step in range(steps):
        ready(ahead - 1)
        total = warpgroup_mma(tiles.index(place), inputs.index(place).permute((1, 0)), total, is_async=True)
        if step + ahead < steps:
            load(tiles.index(filled), at + (step + ahead) * BLOCK_K, eviction_policy=policy)
            load(inputs.index(filled), x_at + (step + ahead) * BLOCK_K, mask=used)
        if OVERLAP and not EARLY and step + ahead == steps:
            depend("griddepcontrol.launch_dependents; // $0")
        async_copy.commit_group()
        place = (place + 1) % STAGES
        filled = (filled + 1) % STAGES
        total = warpgroup_mma_wait(LAG - 1, [total])
    total = warpgroup_mma_wait(0, [total])
    # The layout of ``wgmma``, or that of :func:`finish` for splits, whose sums change layout in any case.
    whole: gl.constexpr = summed if SPLIT == 1 else gl.BlockedLayout([1, 1], [32, 1], [1, warps], [0, 1])
    if SPLIT > 1:
        total = gl.convert_layout(sum_of_splits(total, BLOCK_N, BLOCK_M, SPLIT, summed), whole)
    of_sum = weight_rows(gl.arange(0, BLOCK_N, gl.SliceLayout(1, whole)), N, BLOCK_N, ACTIVATION is not None)
    if input_scales is not None:
        each = gl.program_id(1) * BLOCK_M + gl.arange(0, BLOCK_M, gl.SliceLayout(0, whole))
        total *= gl.load(input_scales + each, mask=each < M, other=0.0)[None, :]
    if scales is not None:
        total *= gl.load(scales + of_sum)[:, None]
    finish(total, of_sum, bias, residual, y, M, N, BLOCK_M, BLOCK_N, ACTIVATION, SPLIT_INPUT)
