"""2 to 256 rows by a weight in blocks on Hopper: :mod:`atom_core.kernels.linear.few_rows_hopper` with a tile per group.

The sums of each group are scaled and then added up in float32. Scales are copied to shared memory with their tiles: a
step is shorter than the latency of memory. Rows of few outputs are split along K, as there.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from atom_core.kernels.launch import entry_kernel
from atom_core.kernels.linear.few_rows_hopper import depend, finish, load, ready, sum_of_splits, weight_rows


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
    SPLIT_INPUT: gl.constexpr,
    SPLIT: gl.constexpr,
):
    """A program has ``BLOCK_N`` weight rows and ``BLOCK_M`` rows of ``x``: all of them, unless ``SPLIT_INPUT``.

    ``STAGES - 1`` tiles are copied ahead, each with columns of all ``SPLIT`` splits of its rows.
    """
    gl.static_assert(SPLIT == 1 or ACTIVATION is None)
    policy: gl.constexpr = "" if SPLIT_INPUT else "evict_first"  # other programs read them too
    dtype: gl.constexpr = weight.dtype.element_ty
    GATED: gl.constexpr = ACTIVATION is not None
    ROWS: gl.constexpr = BLOCK_N * SPLIT
    INPUTS: gl.constexpr = BLOCK_M * SPLIT
    warps: gl.constexpr = gl.num_warps()
    copied: gl.constexpr = gl.BlockedLayout([1, 16], [32 * 16 // SIZE, SIZE // 16], [warps, 1], [1, 0])
    summed: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, INPUTS, 32])
    ahead: gl.constexpr = STAGES - 1
    if OVERLAP and EARLY:
        depend("griddepcontrol.launch_dependents; // $0")
    tiles = gl.allocate_shared_memory(
        dtype, [STAGES, ROWS, SIZE], gl.NVMMASharedLayout.get_default_for([ROWS, SIZE], dtype)
    )
    inputs = gl.allocate_shared_memory(
        dtype, [STAGES, INPUTS, SIZE], gl.NVMMASharedLayout.get_default_for([INPUTS, SIZE], dtype)
    )
    of_tiles, of_inputs = scale_places(STAGES, ROWS, INPUTS)
    steps = K // (SPLIT * SIZE)
    share = steps * SIZE
    column = gl.arange(0, SIZE, gl.SliceLayout(0, copied))
    lane = gl.arange(0, ROWS, gl.SliceLayout(1, copied))
    row = weight_rows(lane % BLOCK_N, N, BLOCK_N, GATED)
    place_of = gl.arange(0, INPUTS, gl.SliceLayout(1, copied))
    given = gl.program_id(1) * BLOCK_M + place_of % BLOCK_M
    used = (given < M)[:, None]
    at = weight + (row * K + lane // BLOCK_N * share)[:, None] + column[None, :]
    x_at = x + (given.to(gl.int64) * K + place_of // BLOCK_M * share)[:, None] + column[None, :]
    line: gl.constexpr = gl.BlockedLayout([1], [32], [warps], [0])
    scale_lane = gl.arange(0, ROWS, line)
    scale_row = weight_rows(scale_lane % BLOCK_N, N, BLOCK_N, GATED)
    mine_at = scales + scale_row // SIZE * (K // SIZE) + scale_lane // BLOCK_N * steps
    each = gl.arange(0, INPUTS, line)
    scale_given = gl.program_id(1) * BLOCK_M + each % BLOCK_M
    known = scale_given < M
    theirs_at = input_scales + scale_given + each // BLOCK_M * steps * stride_input_scales
    for stage in gl.static_range(ahead):
        load(tiles.index(stage), at + stage * SIZE, eviction_policy=policy)
        load(of_tiles.index(stage), mine_at + stage)
        async_copy.commit_group()
    if OVERLAP:
        depend("griddepcontrol.wait; // $0")
    for stage in gl.static_range(ahead):
        load(inputs.index(stage), x_at + stage * SIZE, mask=used)
        load(of_inputs.index(stage), theirs_at + stage * stride_input_scales, mask=known)
        async_copy.commit_group()
    total = gl.zeros([ROWS, INPUTS], gl.float32, summed)
    place = 0
    filled = ahead
    for step in range(steps):
        ready(ahead - 1)
        partial = gl.zeros([ROWS, INPUTS], gl.float32, summed)
        partial = warpgroup_mma(tiles.index(place), inputs.index(place).permute((1, 0)), partial, is_async=True)
        # Before the copies, for whose sake Triton has a barrier behind these loads, and so one after the last product.
        mine = of_tiles.index(place).load(gl.SliceLayout(1, summed))
        theirs = of_inputs.index(place).load(gl.SliceLayout(0, summed))
        # All warps have finished with the tile of the previous step.
        if step + ahead < steps:
            load(tiles.index(filled), at + (step + ahead) * SIZE, eviction_policy=policy)
            load(of_tiles.index(filled), mine_at + step + ahead)
            load(inputs.index(filled), x_at + (step + ahead) * SIZE, mask=used)
            load(of_inputs.index(filled), theirs_at + (step + ahead) * stride_input_scales, mask=known)
        if OVERLAP and not EARLY and step + ahead == steps:
            depend("griddepcontrol.launch_dependents; // $0")
        async_copy.commit_group()
        place = (place + 1) % STAGES
        filled = (filled + 1) % STAGES
        partial = warpgroup_mma_wait(0, [partial])
        total += partial * mine[:, None] * theirs[None, :]
    # The layout of ``wgmma``, or that of :func:`finish` for splits, whose sums change layout in any case.
    whole: gl.constexpr = summed if SPLIT == 1 else gl.BlockedLayout([1, 1], [32, 1], [1, warps], [0, 1])
    if SPLIT > 1:
        total = gl.convert_layout(sum_of_splits(total, BLOCK_N, BLOCK_M, SPLIT, summed), whole)
    of_sum = weight_rows(gl.arange(0, BLOCK_N, gl.SliceLayout(1, whole)), N, BLOCK_N, GATED)
    finish(total, of_sum, bias, residual, y, M, N, BLOCK_M, BLOCK_N, ACTIVATION, False)
