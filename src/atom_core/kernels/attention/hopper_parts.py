"""What attention kernels in Gluon, for Hopper, share: tiles of cached keys and values, and pairs that rope rotates."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from atom_core.cache import KVCacheView
from atom_core.kernels.attention.triton_parts import LOG2_E
from atom_core.kernels.linear.few_rows_hopper import load

if TYPE_CHECKING:
    from atom_core.kernels.attention import PagedAttentionSpec


def aligned(cache: KVCacheView, *others: torch.Tensor) -> bool:
    """Whether rows are aligned to 16 bytes, as Triton knows of arguments that are multiples of 16."""
    tensors = (cache.key, cache.value, *others)
    return all(it.data_ptr() % 16 == 0 and all(stride % 16 == 0 for stride in it.stride()[:-1]) for it in tensors)


def to_base_2(spec: PagedAttentionSpec) -> tuple[float, float]:
    """A layer's scale and soft cap for logits to the base 2; with a cap, the scale is that of :func:`capped`."""
    scale = spec.scale * LOG2_E.value
    if not spec.soft_cap:
        return scale, 0.0
    return 2.0 * scale / spec.soft_cap, spec.soft_cap * LOG2_E.value


@gluon.constexpr_function
def copied_layout(D, warps):
    """The layout of rows of ``D`` elements, 16 bytes of a row by each thread."""
    lanes = D // 8
    return gl.BlockedLayout([1, 8], [32 // lanes, lanes], [warps, 1], [1, 0])


@gluon.constexpr_function
def run_of(PAGE, BLOCK_N, D, warps):
    """Keys of a tile that follow each other in memory, where they have a row for each warp; else 1.

    A thread looks up the pages of so many at once. Tiles begin at multiples of their size, a power of two.
    """
    run = min(PAGE & -PAGE, BLOCK_N)
    return run if run % (256 // D * warps) == 0 else 1


@gluon.constexpr_function
def runs_layout(RUN, D, warps):
    """The layout ``[runs, RUN]`` of a tile's keys, such that a thread has those whose rows it copies."""
    lanes = D // 8
    if RUN == 1:
        of_runs = gl.BlockedLayout([1, 1, 8], [32 // lanes, 1, lanes], [warps, 1, 1], [2, 1, 0])
    else:
        of_runs = gl.BlockedLayout([1, 1, 8], [1, 32 // lanes, lanes], [1, warps, 1], [2, 1, 0])
    return gl.SliceLayout(2, of_runs)


@gluon.jit
def pages_of_runs(
    table, tile, length, BLOCK_N: gl.constexpr, PAGE: gl.constexpr, RUN: gl.constexpr, runs: gl.constexpr
):
    """The page of each run of ``RUN`` keys of a tile, if it begins before ``length``."""
    key = tile + gl.arange(0, BLOCK_N // RUN, gl.SliceLayout(1, runs)) * RUN
    return gl.load(table + key // PAGE, mask=key < length, other=0)


@gluon.jit
def copy_tile(
    to,
    side,
    page,
    tile,
    earliest,
    length,
    stride_page,
    stride_token,
    PAGE: gl.constexpr,
    RUN: gl.constexpr,
    WINDOW: gl.constexpr,
    runs: gl.constexpr,
    copied: gl.constexpr,
):
    """Start to copy a tile of keys or values to shared memory, with zeros from ``length`` on.

    With a window also before ``earliest``: what was there may be another request's by now.
    """
    BLOCK_N: gl.constexpr = to.shape[0]
    D: gl.constexpr = to.shape[1]
    offset = (tile + gl.arange(0, BLOCK_N // RUN, gl.SliceLayout(1, runs)) * RUN) % PAGE
    of_run = page.to(gl.int64) * stride_page + offset.to(gl.int64) * stride_token
    in_run = gl.arange(0, RUN, gl.SliceLayout(0, runs)) * stride_token
    row = gl.convert_layout((of_run[:, None] + in_run[None, :]).reshape([BLOCK_N]), gl.SliceLayout(1, copied))
    # Rows are aligned to 16 bytes, which the compiler no longer sees.
    row = gl.multiple_of(row, 8)
    key = tile + gl.arange(0, BLOCK_N, gl.SliceLayout(1, copied))
    known = key < length
    if WINDOW > 0:
        known = known & (key >= earliest)
    load(to, side + row[:, None] + gl.arange(0, D, gl.SliceLayout(0, copied))[None, :], mask=known[:, None])


@gluon.jit
def capped(scores, scale, soft_cap):
    """``soft_cap * tanh(x)``; ``scale`` makes ``2x`` to the base 2 of a score."""
    # tanh(x) = 1 - 2 / (exp(2x) + 1)
    return soft_cap - 2.0 * soft_cap / (gl.exp2(scores * scale) + 1.0)


@gluon.jit
def scaled(scores, scale, soft_cap, HAS_CAP: gl.constexpr):
    """Logits to the base 2; ``scale`` and ``soft_cap`` are those of :func:`to_base_2`."""
    if HAS_CAP:
        scores = capped(scores, scale, soft_cap)
    else:
        scores *= scale
    return scores


@gluon.jit
def partners(SIZE: gl.constexpr, R: gl.constexpr, INTERLEAVED: gl.constexpr, layout: gl.constexpr):
    """``SIZE`` elements, of which ``R`` are rotated: their index, pair and partner, and whether it is the pair's first.

    Those of the others mean nothing.
    """
    half: gl.constexpr = R // 2
    dim = gl.arange(0, SIZE, layout)
    if INTERLEAVED:
        pair = dim // 2
        is_first = dim % 2 == 0
        partner = gl.where(is_first, dim + 1, dim - 1)
    else:
        pair = dim % half
        is_first = dim < half
        partner = gl.where(is_first, dim + half, dim - half)
    return dim, pair, partner, is_first
