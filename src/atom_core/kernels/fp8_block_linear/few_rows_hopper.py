"""2 to 64 rows by a weight in blocks on Hopper: :mod:`atom_core.kernels.linear.few_rows_hopper` with a tile per group.

The sums of each group are scaled and then added up in float32. Scales are copied to shared memory with their tiles: a
step is shorter than the latency of memory.

A program's warps wait for each other at each step, and so several programs share a multiprocessor, or one multiplies
two tiles between waits. :mod:`.specialized_hopper` has neither need, for weights with a program a multiprocessor.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from atom_core.kernels.launch import entry_kernel
from atom_core.kernels.linear.few_rows_hopper import (
    all_copied,
    depend,
    finish,
    load,
    ready,
    weight_rows,
)


@gluon.jit
def scale_places(STAGES: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_M: gl.constexpr):
    """Shared memory for the scales of each stage: of a tile's rows, and of the input's."""
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    return (
        gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_N], plain),
        gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_M], plain),
    )


@entry_kernel
@gluon.jit(do_not_specialize=["M", "stride_input_scales"])
def few_rows_hopper(
    x,
    input_scales,
    weight,
    scales,
    bias,
    residual,
    y,
    M,
    N,
    K,
    stride_input_scales,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    SIZE: gl.constexpr,
    ACTIVATION: gl.constexpr,
    OVERLAP: gl.constexpr,
    STAGES: gl.constexpr,
    TURN: gl.constexpr,
):
    """A program has ``BLOCK_N`` weight rows and ``BLOCK_M`` rows of ``x``, which are all.

    ``STAGES - TURN`` tiles are copied ahead, and ``TURN`` are multiplied before a program waits for its warps.
    """
    gl.static_assert(STAGES % TURN == 0)
    dtype: gl.constexpr = weight.dtype.element_ty
    GATED: gl.constexpr = ACTIVATION is not None
    warps: gl.constexpr = gl.num_warps()
    copied: gl.constexpr = gl.BlockedLayout([1, 16], [32 * 16 // SIZE, SIZE // 16], [warps, 1], [1, 0])
    summed: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, BLOCK_M, 32])
    ahead: gl.constexpr = STAGES - TURN
    if OVERLAP:
        depend("griddepcontrol.launch_dependents; // $0")
    tiles = gl.allocate_shared_memory(
        dtype, [STAGES, BLOCK_N, SIZE], gl.NVMMASharedLayout.get_default_for([BLOCK_N, SIZE], dtype)
    )
    inputs = gl.allocate_shared_memory(
        dtype, [STAGES, BLOCK_M, SIZE], gl.NVMMASharedLayout.get_default_for([BLOCK_M, SIZE], dtype)
    )
    of_tiles, of_inputs = scale_places(STAGES, BLOCK_N, BLOCK_M)
    steps = K // SIZE
    column = gl.arange(0, SIZE, gl.SliceLayout(0, copied))
    lane = gl.arange(0, BLOCK_N, gl.SliceLayout(1, copied))
    row = weight_rows(lane, N, BLOCK_N, GATED)
    given = gl.arange(0, BLOCK_M, gl.SliceLayout(1, copied))
    used = (given < M)[:, None]
    at = weight + (row * K)[:, None] + column[None, :]
    x_at = x + (given.to(gl.int64) * K)[:, None] + column[None, :]
    line: gl.constexpr = gl.BlockedLayout([1], [32], [warps], [0])
    mine_at = scales + weight_rows(gl.arange(0, BLOCK_N, line), N, BLOCK_N, GATED) // SIZE * steps
    each = gl.arange(0, BLOCK_M, line)
    known = each < M
    theirs_at = input_scales + each
    for stage in gl.static_range(ahead):
        there = stage < steps
        load(tiles.index(stage), at + stage * SIZE, mask=there, eviction_policy="evict_first")
        load(of_tiles.index(stage), mine_at + stage, mask=there)
        async_copy.commit_group()
    if OVERLAP:
        depend("griddepcontrol.wait; // $0")
    for stage in gl.static_range(ahead):
        there = stage < steps
        load(inputs.index(stage), x_at + stage * SIZE, mask=used & there)
        load(of_inputs.index(stage), theirs_at + stage * stride_input_scales, mask=known & there)
        async_copy.commit_group()
    zeros = gl.zeros([BLOCK_N, BLOCK_M], gl.float32, summed)
    total = gl.zeros([BLOCK_N, BLOCK_M], gl.float32, summed)
    place = 0
    filled = ahead
    for step in range(0, steps, TURN):
        ready(ahead - TURN)
        partial = warpgroup_mma(
            tiles.index(place), inputs.index(place).permute((1, 0)), zeros, use_acc=False, is_async=True
        )
        if TURN == 2:
            second = warpgroup_mma(
                tiles.index(place + 1), inputs.index(place + 1).permute((1, 0)), zeros, use_acc=False, is_async=True
            )
        # Before the copies, for whose sake Triton has a barrier behind these loads, and so one after the last product.
        mine = of_tiles.index(place).load(gl.SliceLayout(1, summed))
        theirs = of_inputs.index(place).load(gl.SliceLayout(0, summed))
        if TURN == 2:
            second_mine = of_tiles.index(place + 1).load(gl.SliceLayout(1, summed))
            second_theirs = of_inputs.index(place + 1).load(gl.SliceLayout(0, summed))
        # All warps have finished with the tiles of the previous turn. Masked, for before a branch Triton would wait for
        # each product.
        for stage in gl.static_range(TURN):
            later = step + ahead + stage
            there = later < steps
            load(tiles.index(filled + stage), at + later * SIZE, mask=there, eviction_policy="evict_first")
            load(of_tiles.index(filled + stage), mine_at + later, mask=there)
            load(inputs.index(filled + stage), x_at + later * SIZE, mask=used & there)
            load(of_inputs.index(filled + stage), theirs_at + later * stride_input_scales, mask=known & there)
            async_copy.commit_group()
        place = (place + TURN) % STAGES
        filled = (filled + TURN) % STAGES
        partial = warpgroup_mma_wait(TURN - 1, [partial])
        total += partial * mine[:, None] * theirs[None, :]
        if TURN == 2:
            second = warpgroup_mma_wait(0, [second])
            total += second * second_mine[:, None] * second_theirs[None, :]
    all_copied()
    of_sum = weight_rows(gl.arange(0, BLOCK_N, gl.SliceLayout(1, summed)), N, BLOCK_N, GATED)
    finish(total, of_sum, bias, residual, y, M, N, BLOCK_M, BLOCK_N, ACTIVATION, False)
