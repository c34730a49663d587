"""1 to 64 rows by a weight in blocks, which is read once: rows are the right operand of the product, as in
:mod:`atom_core.kernels.linear.few_rows`. The sums of each group are scaled and then added up in float32.

On Hopper also up to 256 rows by small weights, which are then read once for each 64 rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from atom_core.kernels.gated_activation.triton_kernel import ACTIVATIONS
from atom_core.kernels.launch import entry_kernel
from atom_core.kernels.linear.helpers import finish, weight_rows
from atom_core.kernels.linear.tiles import MAX_ROWS, Tile, on_hopper
from atom_core.kernels.triton_support import cdiv, launch_options, next_power_of_2
from atom_core.quant.fp8 import BLOCK_SIZE
from atom_core.types import Activation


@entry_kernel
@triton.jit(do_not_specialize=["M", "stride_input_scales"])
def _few_rows(
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
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SIZE: tl.constexpr,
    EVEN: tl.constexpr,
    ACTIVATION: tl.constexpr,
    OVERLAP: tl.constexpr,
    STAGES: tl.constexpr,
):
    """A program has ``BLOCK_N`` weight rows and all rows of ``x``."""
    row = weight_rows(N, BLOCK_N, ACTIVATION is not None)
    column = tl.arange(0, SIZE)
    given = tl.arange(0, BLOCK_M)
    at = weight + row[:, None] * K + column[None, :]
    x_at = x + given.to(tl.int64)[None, :] * K + column[:, None]
    scale_at = scales + row // SIZE * tl.cdiv(K, SIZE)
    used = given < M
    total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    for begin in tl.range(0, K, SIZE, num_stages=STAGES):
        if EVEN:
            tile = tl.load(at + begin, eviction_policy="evict_first")
            right = tl.load(x_at + begin, mask=used[None, :], other=0.0)
        else:
            known = begin + column < K
            tile = tl.load(at + begin, mask=known[None, :], other=0.0, eviction_policy="evict_first")
            right = tl.load(x_at + begin, mask=used[None, :] & known[:, None], other=0.0)
        group = begin // SIZE
        mine = tl.load(scale_at + group)
        theirs = tl.load(input_scales + group * stride_input_scales + given, mask=used, other=0.0)
        total += tl.dot(tile, right) * mine[:, None] * theirs[None, :]
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
    finish(tl.trans(total), None, None, bias, residual, y, row, given, M, N, BLOCK_M, BLOCK_N, ACTIVATION)


def input_rows(num_rows: int) -> int:
    """Rows of the input that one program takes, of ``num_rows``."""
    return int(max(16, next_power_of_2(num_rows)))


def multiply_few_rows(
    x: torch.Tensor,
    input_scales: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    nvidia: bool,
    overlap: bool,
    dtype: torch.dtype,
    activation: Activation | None = None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """``act(x W^T + b) + residual`` for 1 to :data:`MAX_ROWS` rows, and those that :func:`takes_more` tells.

    Args:
        x: ``[M, K]`` in a variant of e4m3.
        input_scales: float32 ``[ceil(K / 128), M]``, as :func:`.quantize.quantize_groups` returns them.
        weight: ``[N, K]`` in the same variant, contiguous.
        scales: float32 ``[ceil(N / 128), ceil(K / 128)]``, for e4m3fn values.
        bias: ``[N]``.
        nvidia: whether the device is NVIDIA's; others have less shared memory.
        overlap: see :func:`atom_core.kernels.triton_support.overlaps`.
        dtype: the result's.
        activation: the weight is ``[gate | up]``; the result is ``[M, N / 2]``.
        residual: contiguous, of the result's shape; it is added to and returned.
    """
    num_rows, (out_features, in_features) = len(x), weight.shape
    assert 0 < num_rows <= MAX_ROWS or takes_more(num_rows, weight)
    assert x.dtype == weight.dtype
    assert all(it.is_contiguous() for it in (x, input_scales, weight, scales))
    assert residual is None or residual.is_contiguous()
    outputs = out_features if activation is None else out_features // 2
    y = x.new_empty(num_rows, outputs, dtype=dtype) if residual is None else residual
    block_rows = input_rows(num_rows)
    if on_hopper(x.device) and in_features % BLOCK_SIZE == 0:
        return _multiply_on_hopper(x, input_scales, weight, scales, bias, residual, y, block_rows, activation, overlap)
    block = 64 if nvidia else 32
    _few_rows[(cdiv(outputs, block if activation is None else block // 2),)](
        x,
        input_scales,
        weight,
        scales,
        bias,
        residual,
        y,
        num_rows,
        out_features,
        in_features,
        num_rows,
        BLOCK_M=block_rows,
        BLOCK_N=block,
        SIZE=BLOCK_SIZE,
        EVEN=in_features % BLOCK_SIZE == 0,
        ACTIVATION=None if activation is None else ACTIVATIONS[activation],
        OVERLAP=overlap,
        # Many tiles in flight keep memory busy with few programs.
        STAGES=(8 if block_rows <= 32 else 6) if nvidia else 2,
        num_warps=4,
        **launch_options(overlap),
    )
    return y


#: Shared memory of a multiprocessor on Hopper for tiles, and how many multiprocessors there are.
_SHARED, _MULTIPROCESSORS = 220 * 1024, 132
#: The most tiles ahead of 33 to 64 rows that are shared out, and of more rows: with 13 they take an H200 longer, 8.2 in
#: place of 7.4 us (2,048 x 4,096, 64 rows) and 11.8 in place of 11.4 (256).
_MOST_STAGES = {64: 8, 128: 10, 256: 10}
#: The most rows that :mod:`.few_rows_hopper` multiplies.
MOST_ROWS = 256


def takes_more(num_rows: int, weight: torch.Tensor) -> bool:
    """Whether :mod:`.few_rows_hopper` multiplies more than :data:`MAX_ROWS` rows by ``weight [N, K]``.

    It does where its programs for 64 rows of both run at once. cuBLAS has tiles of 128 rows, and so fewer programs: on
    an H200 2,048 x 4,096 take it 14.5 us for 128 and 256 rows, and this kernel 10.7 and 11.4; 4,096 x 2,048 and 128
    rows 9.3 and 7.1.
    """
    out_features, in_features = weight.shape
    programs = cdiv(out_features, 64) * cdiv(num_rows, MAX_ROWS)
    whole = in_features % BLOCK_SIZE == 0
    return num_rows <= MOST_ROWS and programs <= _MULTIPROCESSORS and whole and on_hopper(weight.device)


def hopper_tile(block_rows: int, out_features: int, in_features: int, activation: Activation | None = None) -> Tile:
    """The tile of :mod:`.few_rows_hopper`: as many stages as there are steps, or as fit.

    Few outputs are split, and many rows of theirs are several programs', so that most multiprocessors have one. Where
    there are a few programs more than multiprocessors, two have room on each, as a second wave would take as long as
    the first.
    """
    programs = cdiv(out_features, 64)
    split, tokens = 1, block_rows
    if activation is None:
        split, tokens = _parts(programs, block_rows)
    while in_features % (split * BLOCK_SIZE):
        split //= 2
    programs = programs * split * (block_rows // tokens)
    # More rows than MAX_ROWS have as many programs as run at once, whatever a power of two says.
    together = 2 if block_rows <= MAX_ROWS and _MULTIPROCESSORS < programs <= 2 * _MULTIPROCESSORS else 1
    # In bytes: of weight and input, and of their scales.
    stage = (64 + split * tokens) * (BLOCK_SIZE + 4)
    most = 20 if tokens == block_rows else _MOST_STAGES.get(block_rows, 20)
    stages = min(most, _SHARED // together // stage, in_features // (split * BLOCK_SIZE) + 1)
    return Tile("hopper", 64 // split, BLOCK_SIZE, 4, stages, early=True, tokens=tokens, split=split)


def _parts(programs: int, block_rows: int) -> tuple[int, int]:
    """In how many parts rows of the weight are split, and how many rows of the input a program has.

    Args:
        programs: without parts, of all rows of the input.
        block_rows: rows of the input, a power of two.
    """
    if block_rows > MAX_ROWS:
        return 1, MAX_ROWS
    if programs > _MULTIPROCESSORS // 2:
        return 1, block_rows
    if programs > _MULTIPROCESSORS // 4:
        return (2 if block_rows <= 16 else 1), block_rows
    # Sums of all parts, and those of a step, have to have room in registers.
    return (4, 16) if block_rows <= 32 else (2, 32)


def _multiply_on_hopper(
    x: torch.Tensor,
    input_scales: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    y: torch.Tensor,
    block_rows: int,
    activation: Activation | None,
    overlap: bool,
) -> torch.Tensor:
    # Gluon is experimental in Triton; other devices may lack it.
    from atom_core.kernels.fp8_block_linear.few_rows_hopper import few_rows_hopper

    num_rows, (out_features, in_features) = len(x), weight.shape
    tile = hopper_tile(block_rows, out_features, in_features, activation)
    few_rows_hopper[(cdiv(out_features, tile.rows), cdiv(num_rows, tile.tokens))](
        x,
        input_scales,
        weight,
        scales,
        bias,
        residual,
        y,
        num_rows,
        out_features,
        in_features,
        num_rows,
        BLOCK_M=tile.tokens,
        BLOCK_N=tile.rows,
        SIZE=BLOCK_SIZE,
        ACTIVATION=None if activation is None else ACTIVATIONS[activation],
        OVERLAP=overlap,
        EARLY=tile.early,
        STAGES=tile.stages,
        SPLIT_INPUT=tile.tokens < block_rows,
        SPLIT=tile.split,
        num_warps=tile.warps,
        **launch_options(overlap),
    )
    return y
