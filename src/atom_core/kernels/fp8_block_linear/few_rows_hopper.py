"""2 to 64 rows by a weight in blocks on Hopper: :mod:`atom_core.kernels.linear.few_rows_hopper` with a tile per group.

The sums of each group are scaled and then added up in float32. Scales are copied to shared memory with their tiles: a
step is shorter than the latency of memory.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from atom_core.kernels.launch import entry_kernel
from atom_core.kernels.linear.few_rows_hopper import depend, finish, load, ready, weight_rows


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
    EARLY: gl.constexpr,
    STAGES: gl.constexpr,
):
    """A program has ``BLOCK_N`` weight rows and all rows of ``x``; ``STAGES - 1`` tiles are copied ahead."""
    dtype: gl.constexpr = weight.dtype.element_ty
    GATED: gl.constexpr = ACTIVATION is not None
    warps: gl.constexpr = gl.num_warps()
    copied: gl.constexpr = gl.BlockedLayout([1, 16], [32 * 16 // SIZE, SIZE // 16], [warps, 1], [1, 0])
    summed: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, BLOCK_M, 32])
    ahead: gl.constexpr = STAGES - 1
    if OVERLAP and EARLY:
        depend("griddepcontrol.launch_dependents; // $0")
    tiles = gl.allocate_shared_memory(
        dtype, [STAGES, BLOCK_N, SIZE], gl.NVMMASharedLayout.get_default_for([BLOCK_N, SIZE], dtype)
    )
    inputs = gl.allocate_shared_memory(
        dtype, [STAGES, BLOCK_M, SIZE], gl.NVMMASharedLayout.get_default_for([BLOCK_M, SIZE], dtype)
    )
    of_tiles, of_inputs = scale_places(STAGES, BLOCK_N, BLOCK_M)
    column = gl.arange(0, SIZE, gl.SliceLayout(0, copied))
    row = weight_rows(gl.arange(0, BLOCK_N, gl.SliceLayout(1, copied)), N, BLOCK_N, GATED)
    given = gl.arange(0, BLOCK_M, gl.SliceLayout(1, copied))
    used = (given < M)[:, None]
    at = weight + row[:, None] * K + column[None, :]
    x_at = x + given.to(gl.int64)[:, None] * K + column[None, :]
    steps = K // SIZE
    line: gl.constexpr = gl.BlockedLayout([1], [32], [warps], [0])
    mine_at = scales + weight_rows(gl.arange(0, BLOCK_N, line), N, BLOCK_N, GATED) // SIZE * steps
    each = gl.arange(0, BLOCK_M, line)
    theirs_at = input_scales + each
    for stage in gl.static_range(ahead):
        load(tiles.index(stage), at + stage * SIZE, eviction_policy="evict_first")
        load(of_tiles.index(stage), mine_at + stage)
        async_copy.commit_group()
    of_sum = weight_rows(gl.arange(0, BLOCK_N, gl.SliceLayout(1, summed)), N, BLOCK_N, GATED)
    if OVERLAP:
        depend("griddepcontrol.wait; // $0")
    for stage in gl.static_range(ahead):
        load(inputs.index(stage), x_at + stage * SIZE, mask=used)
        load(of_inputs.index(stage), theirs_at + stage * stride_input_scales, mask=each < M)
        async_copy.commit_group()
    total = gl.zeros([BLOCK_N, BLOCK_M], gl.float32, summed)
    place = 0
    filled = ahead
    for step in range(steps):
        ready(ahead - 1)
        partial = gl.zeros([BLOCK_N, BLOCK_M], gl.float32, summed)
        partial = warpgroup_mma(tiles.index(place), inputs.index(place).permute((1, 0)), partial, is_async=True)
        # All warps have finished with the tile of the previous step.
        if step + ahead < steps:
            load(tiles.index(filled), at + (step + ahead) * SIZE, eviction_policy="evict_first")
            load(of_tiles.index(filled), mine_at + step + ahead)
            load(inputs.index(filled), x_at + (step + ahead) * SIZE, mask=used)
            load(of_inputs.index(filled), theirs_at + (step + ahead) * stride_input_scales, mask=each < M)
        if OVERLAP and not EARLY and step + ahead == steps:
            depend("griddepcontrol.launch_dependents; // $0")
        async_copy.commit_group()
        mine = of_tiles.index(place).load(gl.SliceLayout(1, summed))
        theirs = of_inputs.index(place).load(gl.SliceLayout(0, summed))
        place = (place + 1) % STAGES
        filled = (filled + 1) % STAGES
        partial = warpgroup_mma_wait(0, [partial])
        total += partial * mine[:, None] * theirs[None, :]
    finish(total, of_sum, bias, residual, y, M, N, BLOCK_M, BLOCK_N, ACTIVATION, False)
