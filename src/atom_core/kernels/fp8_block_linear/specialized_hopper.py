"""2 to 256 rows by a weight in blocks on Hopper with specialised warps, for weights with fewer tiles than fill the GPU.

One warp copies tiles of the weight and of the input by TMA. Three warp groups take turns at the steps of a tile: while
one scales its sums, others multiply, and no step waits for all warps. What the groups have summed is added up in shared
memory, in their order.
"""

from __future__ import annotations

import functools

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from atom_core.kernels.fp8_block_linear.hopper_tiles import ROWS, SpecializedTile
from atom_core.kernels.launch import entry_kernel
from atom_core.kernels.linear.few_rows_hopper import barrier, depend, finish, load_tile
from atom_core.kernels.triton_support import cdiv, launch_options
from atom_core.quant.fp8 import BLOCK_SIZE

#: Warp groups that multiply, and tiles in flight or being multiplied: a multiple of the groups. A barrier does not tell
#: a step from the one after the next in the same place, so all steps of a place have to be one group's.
_GROUPS, _STAGES = gl.constexpr(3), 9
#: Registers of a thread that multiplies, and of one that copies. The first group has the rest of a multiprocessor's.
_MULTIPLIES, _COPIES = gl.constexpr(152), gl.constexpr(32)


@gluon.jit
def _copy(given, OVERLAP: gl.constexpr):
    """Copy the tiles of all steps, each once the group has finished with the one whose place it takes."""
    weight, x, tiles, inputs, full, empty, row, token, steps = given
    STAGES: gl.constexpr = inputs.shape[0]
    SIZE: gl.constexpr = inputs.shape[2]
    size: gl.constexpr = (tiles.shape[1] + inputs.shape[1]) * SIZE
    for stage in gl.static_range(STAGES):
        there = stage < steps
        mbarrier.expect(full.index(stage), size, pred=there)
        load_tile(weight, [row, stage * SIZE], full.index(stage), tiles.index(stage), pred=there)
    if OVERLAP:
        depend("griddepcontrol.wait; // $0")
    for stage in gl.static_range(STAGES):
        there = stage < steps
        load_tile(x, [token, stage * SIZE], full.index(stage), inputs.index(stage), pred=there)
    place = 0
    phase = 0
    for step in range(STAGES, steps):
        mbarrier.wait(empty.index(place), phase)
        mbarrier.expect(full.index(place), size)
        load_tile(weight, [row, step * SIZE], full.index(place), tiles.index(place))
        load_tile(x, [token, step * SIZE], full.index(place), inputs.index(place))
        place += 1
        if place == STAGES:
            place = 0
            phase ^= 1


@gluon.jit
def _multiply_in_turns(given, GROUP: gl.constexpr, SIZE: gl.constexpr, OVERLAP: gl.constexpr):
    """Multiply the tiles of every third step, from ``GROUP`` on."""
    (
        input_scales, scales, bias, residual, y, tiles, inputs, sums, full, empty, done, row, token, steps, M, N,
        stride_input_scales,
    ) = given  # fmt: skip
    STAGES: gl.constexpr = inputs.shape[0]
    TOKENS: gl.constexpr = inputs.shape[1]
    ROWS: gl.constexpr = tiles.shape[1]
    summed: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, TOKENS, 32])
    mine_at = scales + row // SIZE * steps  # of the tile's only block
    of_token = token + gl.arange(0, TOKENS, gl.SliceLayout(0, summed))
    known = of_token < M
    theirs_at = input_scales + of_token
    mine = gl.load(mine_at + GROUP, mask=steps > GROUP, other=0.0)
    if OVERLAP:
        depend("griddepcontrol.wait; // $0")
    theirs = gl.load(theirs_at + GROUP * stride_input_scales, mask=known & (steps > GROUP), other=0.0)
    zeros = gl.zeros([ROWS, TOKENS], gl.float32, summed)
    total = gl.zeros([ROWS, TOKENS], gl.float32, summed)
    for step in range(GROUP, steps, _GROUPS):
        place = step % STAGES
        # Those of the next step, which take longer to arrive than a product.
        later = step + _GROUPS
        next_mine = gl.load(mine_at + later, mask=later < steps, other=0.0)
        next_theirs = gl.load(theirs_at + later * stride_input_scales, mask=known & (later < steps), other=0.0)
        mbarrier.wait(full.index(place), step // STAGES & 1)
        partial = warpgroup_mma(
            tiles.index(place), inputs.index(place).permute((1, 0)), zeros, use_acc=False, is_async=True
        )
        partial = warpgroup_mma_wait(0, [partial])
        mbarrier.arrive(empty.index(place), count=1)
        total += partial * (mine * theirs)[None, :]
        mine = next_mine
        theirs = next_theirs
    if GROUP > 0:
        sums.index(GROUP - 1).store(total)
        barrier()  # all threads have stored
        mbarrier.arrive(done, count=1)
    else:
        mbarrier.wait(done, 0)
        for other in gl.static_range(_GROUPS - 1):
            total += sums.index(other).load(summed)
        of_sum = gl.minimum(row + gl.arange(0, ROWS, gl.SliceLayout(1, summed)), N - 1)
        finish(total, of_sum, bias, residual, y, M, N, TOKENS, ROWS, None, False)


@entry_kernel
@gluon.jit(do_not_specialize=["M", "stride_input_scales"])
def specialized_rows_hopper(
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
    SIZE: gl.constexpr,
    STAGES: gl.constexpr,
    OVERLAP: gl.constexpr,
):
    """A program has a tile of the weight by a tile of ``x``; both are descriptors. See the module."""
    gl.static_assert(STAGES % _GROUPS == 0)
    TOKENS: gl.constexpr = x.block_type.shape[0]
    ROWS: gl.constexpr = weight.block_type.shape[0]
    if OVERLAP:
        depend("griddepcontrol.launch_dependents; // $0")
    tiles = gl.allocate_shared_memory(weight.dtype, [STAGES, ROWS, SIZE], weight.layout)
    inputs = gl.allocate_shared_memory(x.dtype, [STAGES, TOKENS, SIZE], x.layout)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    sums = gl.allocate_shared_memory(gl.float32, [_GROUPS - 1, ROWS, TOKENS], plain)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    done = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=1)
    mbarrier.init(done, count=_GROUPS - 1)
    fence_async_shared()
    barrier()
    steps = K // SIZE
    row = gl.program_id(0) * ROWS
    token = gl.program_id(1) * TOKENS
    given = (
        input_scales, scales, bias, residual, y, tiles, inputs, sums, full, empty, done, row, token, steps, M, N,
        stride_input_scales,
    )  # fmt: skip
    copied = (weight, x, tiles, inputs, full, empty, row, token, steps)
    # Constants are written where they are given: what a variable has is a number of the GPU's.
    gl.warp_specialize(
        [
            (_multiply_in_turns, (given, 0, SIZE, OVERLAP)),
            (_multiply_in_turns, (given, 1, SIZE, OVERLAP)),
            (_multiply_in_turns, (given, 2, SIZE, OVERLAP)),
            (_copy, (copied, OVERLAP)),
        ],
        [4, 4, 1],
        [_MULTIPLIES, _MULTIPLIES, _COPIES],
    )


@functools.lru_cache
def _layout(rows: int) -> gl.NVMMASharedLayout:
    """A tile's in shared memory; to make one takes as long as a launch."""
    return gl.NVMMASharedLayout.get_default_for([rows, BLOCK_SIZE], gl.float8e4nv)


def _descriptor(matrix: torch.Tensor, rows: int) -> TensorDescriptor:
    assert matrix.data_ptr() % 16 == 0, "TMA copies from multiples of 16 bytes"
    return TensorDescriptor(matrix, list(matrix.shape), [matrix.shape[1], 1], [rows, BLOCK_SIZE], _layout(rows))


def multiply_specialized(
    x: torch.Tensor,
    input_scales: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    y: torch.Tensor,
    *,
    tile: SpecializedTile,
    overlap: bool,
) -> None:
    """Write :func:`.few_rows.multiply_few_rows` to ``y``.

    Args:
        x, input_scales, weight, scales, bias, residual, overlap: as there.
        y: contiguous; ``residual`` or another tensor of its shape.
        tile: what a program multiplies.
    """
    num_rows, (out_features, in_features) = len(x), weight.shape
    specialized_rows_hopper[cdiv(out_features, ROWS), cdiv(num_rows, tile.tokens)](
        _descriptor(x, tile.tokens),
        input_scales,
        _descriptor(weight, ROWS),
        scales,
        bias,
        residual,
        y,
        num_rows,
        out_features,
        in_features,
        input_scales.shape[1],
        SIZE=BLOCK_SIZE,
        STAGES=_STAGES,
        OVERLAP=overlap,
        num_warps=4,
        **launch_options(overlap),
    )
