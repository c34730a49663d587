"""Products of few rows in Triton, where the time is that of reading the weight once.

One row is multiplied number by number. The first tile of the weight is loaded before the input is there, each further
one before the last is used, so that the memory always has something to do. 2 to 16 rows are the right side of a matrix
product, because its instructions want many rows on the left and few on the right. More rows are torch's.

All can end in a gated activation (rows of gate and up are taken in turns) or add to a residual. Where the input is read
whole anyhow, they can norm it on the way, because the norm's factor may be applied to the sums.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from atom_core.config import Activation
from atom_core.kernels import tuned
from atom_core.kernels.gated_activation.triton_kernel import ACTIVATIONS, activated
from atom_core.kernels.opaque import opaque
from atom_core.kernels.triton_support import launch_options

#: Rows up to which ours is used, more are torch's; and those where weight and input are FP8.
MAX_ROWS, MAX_FP8_ROWS = 16, 64


@triton.jit
def _weight_rows(N, BLOCK_N: tl.constexpr, GATED: tl.constexpr):
    """The weight's rows of this program, in the order in which it takes them; past the last, the last again."""
    lane = tl.arange(0, BLOCK_N)
    if GATED:
        half = N // 2
        row = tl.minimum(tl.program_id(0) * (BLOCK_N // 2) + lane // 2, half - 1) + lane % 2 * half
    else:
        row = tl.minimum(tl.program_id(0) * BLOCK_N + lane, N - 1)
    return row.to(tl.int64)


@triton.jit
def _finish(
    total,
    input_scales,
    scales,
    bias,
    residual,
    y,
    row,
    given,
    M,
    N,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ACTIVATION: tl.constexpr,
):
    """Scale ``total [BLOCK_M, BLOCK_N]``, add what is to be added, activate and store."""
    if input_scales is not None:
        total *= tl.load(input_scales + given, mask=given < M, other=0.0)[:, None]
    if scales is not None:
        total *= tl.load(scales + row)[None, :]
    if bias is not None:
        total += tl.load(bias + row).to(tl.float32)[None, :]
    width = N
    if ACTIVATION is not None:
        gate, up = tl.split(tl.reshape(total, (BLOCK_M, BLOCK_N // 2, 2)))
        # Rounded where a kernel of its own would read them.
        gate = gate.to(y.dtype.element_ty).to(tl.float32)
        up = up.to(y.dtype.element_ty).to(tl.float32)
        total = activated(gate, ACTIVATION) * up
        width = N // 2
        out = tl.program_id(0) * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
    else:
        out = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    at = given.to(tl.int64)[:, None] * width + out[None, :]
    used = (given < M)[:, None] & (out < width)[None, :]
    if residual is not None:
        total += tl.load(residual + at, mask=used, other=0.0).to(tl.float32)
    tl.store(y + at, total.to(y.dtype.element_ty), mask=used)


@triton.jit
def _products(tile, wide, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """``tile * wide``, summed up as far as one thread has the numbers: few registers, no exchange."""
    return tl.sum(tl.reshape(tile.to(tl.float32) * wide[None, :], (BLOCK_N, BLOCK_K // 8, 8)), 2)


@triton.jit
def _row(
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
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN: tl.constexpr,
    ACTIVATION: tl.constexpr,
    OVERLAP: tl.constexpr,
    EARLY: tl.constexpr,
):
    tl.static_assert(input_scales is None)
    if OVERLAP and EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    row = _weight_rows(N, BLOCK_N, ACTIVATION is not None)
    column = tl.arange(0, BLOCK_K)
    at = weight + row[:, None] * stride_weight + column[None, :]
    # The first tile of the weight is on its way before x is there, and each further one before the last is used.
    known = tl.full([BLOCK_K], True, tl.int1) if EVEN else column < K
    tile = tl.load(at, mask=known[None, :], other=0.0, eviction_policy="evict_first")
    if norm is not None:
        factors = tl.load(norm + column, mask=known, other=0.0)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    wide = tl.load(x + column, mask=known, other=0.0).to(tl.float32)
    sums = tl.zeros([BLOCK_N, BLOCK_K // 8], tl.float32)
    squares = tl.zeros([BLOCK_K], tl.float32)
    for begin in tl.range(BLOCK_K, K, BLOCK_K):
        if not EVEN:
            known = begin + column < K
        ahead = tl.load(at + begin, mask=known[None, :], other=0.0, eviction_policy="evict_first")
        wide_ahead = tl.load(x + begin + column, mask=known, other=0.0).to(tl.float32)
        if norm is not None:
            squares += wide * wide
            wide *= factors.to(tl.float32)
            factors = tl.load(norm + begin + column, mask=known, other=0.0)
        sums += _products(tile, wide, BLOCK_N, BLOCK_K)
        tile = ahead
        wide = wide_ahead
    if OVERLAP and not EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    if norm is not None:
        squares += wide * wide
        wide *= factors.to(tl.float32)
    total = tl.sum(sums + _products(tile, wide, BLOCK_N, BLOCK_K), 1)
    if norm is not None:
        total *= 1.0 / tl.sqrt(tl.sum(squares, 0) / K + eps)
    _finish(total[None, :], None, scales, bias, residual, y, row, tl.arange(0, 1), M, N, 1, BLOCK_N, ACTIVATION)


@triton.jit
def _fetch(at):
    """Have the second-level cache fetch the lines at these addresses."""
    tl.inline_asm_elementwise(
        "{ prefetch.global.L2 [$1]; mov.u32 $0, 0; }", "=r,l", [at], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit(do_not_specialize=["M"])
def _rows(
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
    tl.static_assert(norm is None)
    if OVERLAP and EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    row = _weight_rows(N, BLOCK_N, ACTIVATION is not None)
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
    _finish(tl.trans(total), input_scales, scales, bias, residual, y, row, given, M, N, BLOCK_M, BLOCK_N, ACTIVATION)


#: Bytes of a line of the second-level cache, and lines of each row of the weight that are fetched there while the input
#: is not there yet, by the kernel whose loop cannot have its first tiles on their way by then.
_LINE, _FETCHED = 128, 4

Kernel = Literal["row", "rows"]


@dataclass(frozen=True)
class Tile:
    """A kernel, and what one of its programs takes."""

    kernel: Kernel
    rows: int
    """Rows of the weight."""
    columns: int
    """Columns of it at a time."""
    warps: int
    stages: int = 1
    """How many tiles are on their way at once."""
    early: bool = False
    """Whether the next kernel may start when this one's programs all have, and not only when they are done."""

    @property
    def norms(self) -> bool:
        """Whether the kernel can norm its input."""
        return self.kernel == "row"


#: Bytes of a weight that is read in about the time that a kernel takes to start and to end.
_SMALL_BYTES = 16 << 20


def tile_for(num_rows: int, out_features: int, in_features: int, itemsize: int, nvidia: bool) -> Tile:
    """The tile of a product; on an H200 within a few per cent of the best of 60 in a chain of Qwen3 0.6B's and 8B's."""
    if itemsize == 1:
        if not nvidia:
            return Tile("rows", 32, 256, 4, 2)
        if out_features >= 16384:
            return Tile("rows", 64, 128, 4, 4)
        return Tile("rows", 64, 256, 4, 5 if num_rows <= 16 else 4)
    if num_rows > 1 or out_features >= 65536:
        if not nvidia:
            return Tile("rows", 32, 256, 4, 2)
        if out_features >= 16384:
            return Tile("rows", 64, 128, 4, 3)
        return Tile("rows", 32, 128, 4, 6) if in_features > 4096 else Tile("rows", 64, 128, 4, 5, early=True)
    if not nvidia:
        return Tile("row", 4, 1024, 4)
    if out_features * in_features * itemsize <= _SMALL_BYTES:
        if out_features > in_features:
            return Tile("row", 4, 512, 2, early=True)
        if in_features > 2048:
            return Tile("row", 8, 1024, 4, early=True)
        return Tile("row", 2, max(128, triton.next_power_of_2(in_features)), 4, early=True)
    if out_features >= 16384:
        return Tile("row", 16, 256, 4)
    return Tile("row", 16 if out_features >= 4096 else 8, 1024, 8, early=True)


def chosen_tile(x: torch.Tensor, weight: torch.Tensor, nvidia: bool) -> Tile:
    """The tile for ``x [M, K]`` and ``weight [N, K]``: the one measured to be fastest here, or the default."""
    dtype = str(weight.dtype).removeprefix("torch.")
    return _chosen_tile(_device_name(x.device), x.shape[0], weight.shape[0], weight.shape[1], dtype, nvidia)


@functools.lru_cache(maxsize=4096)
def _chosen_tile(device: str, num_rows: int, out_features: int, in_features: int, dtype: str, nvidia: bool) -> Tile:
    found = tuned.lookup(Path(__file__).parent, device, num_rows, out_features, in_features, dtype)
    if found is not None:
        return Tile(**found)
    return tile_for(num_rows, out_features, in_features, getattr(torch, dtype).itemsize, nvidia)


@functools.lru_cache
def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


@dataclass(frozen=True)
class Norm:
    """An RMS norm of the input."""

    weight: torch.Tensor
    eps: float


def product(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    tile: Tile,
    overlap: bool,
    scales: torch.Tensor | None = None,
    input_scales: torch.Tensor | None = None,
    norm: Norm | None = None,
    activation: Activation | None = None,
    residual: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """``act(norm(input_scales x) (scales W)^T + b) + residual``, of at most :data:`MAX_ROWS` rows.

    Args:
        x: ``[M, K]`` in bfloat16 or float16; or in FP8, of at most :data:`MAX_FP8_ROWS` rows.
        weight: ``[N, K]`` in the same dtype.
        bias: ``[N]``.
        tile: see :func:`chosen_tile`.
        overlap: see :func:`atom_core.kernels.triton_support.overlaps`.
        scales: float32 ``[N]``, of the weight's rows.
        input_scales: float32 ``[M]``, with FP8.
        norm: norm ``x`` first; only where ``tile.norms``.
        activation: the weight is ``[gate | up]``; the result is ``[M, N / 2]``.
        residual: contiguous, in the result's shape; it is written to, and is the result.
        dtype: the result's; None: that of ``x``.
    """
    num_rows = x.shape[0]
    assert 0 < num_rows <= (MAX_ROWS if input_scales is None else MAX_FP8_ROWS)
    assert x.dtype == weight.dtype
    assert x.stride(1) == weight.stride(1) == 1
    assert norm is None or tile.norms
    assert residual is None or residual.is_contiguous()
    out_features, in_features = weight.shape
    outputs = out_features if activation is None else out_features // 2
    y = x.new_empty(num_rows, outputs, dtype=dtype) if residual is None else residual
    choices: dict[str, object] = {}
    if tile.kernel == "rows":
        choices = {"BLOCK_M": max(16, triton.next_power_of_2(num_rows)), "STAGES": tile.stages}
        choices["LINE"] = _LINE
        choices["FETCH"] = _FETCHED if overlap and in_features * weight.itemsize >= _FETCHED * _LINE else 0
    _KERNELS[tile.kernel][(triton.cdiv(outputs, tile.rows if activation is None else tile.rows // 2),)](
        x,
        input_scales,
        None if norm is None else norm.weight,
        weight,
        scales,
        bias,
        residual,
        y,
        0.0 if norm is None else norm.eps,
        num_rows,
        out_features,
        in_features,
        x.stride(0),
        weight.stride(0),
        BLOCK_N=tile.rows,
        BLOCK_K=tile.columns,
        EVEN=in_features % tile.columns == 0,
        ACTIVATION=None if activation is None else ACTIVATIONS[activation],
        OVERLAP=overlap,
        EARLY=tile.early,
        num_warps=tile.warps,
        **choices,
        **launch_options(overlap),
    )
    return y


_KERNELS = {"row": _row, "rows": _rows}


class TritonLinear:
    """See :mod:`atom_core.kernels.linear`.

    Args:
        nvidia: whether the device is one of NVIDIA's; others have less shared memory.
        overlap: see :func:`atom_core.kernels.triton_support.overlaps`.
    """

    def __init__(self, nvidia: bool, overlap: bool) -> None:
        self.nvidia, self.overlap = nvidia, overlap

    def adopt(self, weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
        """It reads the weight as it is."""
        return False

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """``x [T, in]`` to ``[T, out]``."""
        return linear(x, weight, bias, self.nvidia, self.overlap)

    def add(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor
    ) -> torch.Tensor:
        """See :class:`atom_core.kernels.linear.AddingLinearKernel`: ours for few rows, torch's for more."""
        if not 0 < x.shape[0] <= MAX_ROWS:
            residual.addmm_(x, weight.t())
            return residual if bias is None else residual.add_(bias)
        tile = chosen_tile(x, weight, self.nvidia)
        return product(x, weight, bias, tile=tile, overlap=self.overlap, residual=residual)


def _fake(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, nvidia: bool, overlap: bool
) -> torch.Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])


@opaque("linear", _fake)
def linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, nvidia: bool, overlap: bool
) -> torch.Tensor:
    """``x W^T + b``: ours for few rows, torch's for more."""
    if not 0 < x.shape[0] <= MAX_ROWS:
        return F.linear(x, weight, bias)
    return product(x, weight, bias, tile=chosen_tile(x, weight, nvidia), overlap=overlap)
