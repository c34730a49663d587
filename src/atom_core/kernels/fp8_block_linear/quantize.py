"""Quantise activations to FP8 with a scale for each group of a row, together with the op before."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from atom_core.kernels.fp8_linear.quantize import AS_IT_IS, Made, made, scale_factor, store_groups, unit_of
from atom_core.kernels.fp8_linear.reference import LIMIT, SMALLEST
from atom_core.kernels.launch import entry_kernel
from atom_core.kernels.triton_support import cdiv, launch_options, next_power_of_2

#: Groups of a row in one program, where no op needs the whole row.
_GROUPS = 16


@entry_kernel
@triton.jit(do_not_specialize=["stride_scales", "num_cleared"])
def _quantize_groups(
    x,
    residual,
    norm,
    slots,
    cleared,
    quantized,
    scales,
    eps,
    stride_x,
    stride_residual,
    stride_scales,
    num_cleared,
    K: tl.constexpr,
    ACTIVATION: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    UNIT: tl.constexpr,
    FACTOR: tl.constexpr,
    LIMIT: tl.constexpr,
    SMALLEST: tl.constexpr,
    OVERLAP: tl.constexpr,
    LATE: tl.constexpr,
    CLEARED: tl.constexpr,
):
    """One row, or some groups of it."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * (GROUPS * GROUP) + tl.arange(0, GROUPS * GROUP)
    known = column < K
    factors = 1.0
    if norm is not None:
        factors = tl.load(norm + column, mask=known, other=0.0).to(tl.float32)
    if OVERLAP:
        if not LATE:
            tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
        if LATE:
            tl.extra.cuda.gdc_launch_dependents()
    if cleared is not None:
        mine = row * CLEARED + tl.arange(0, CLEARED)
        tl.store(cleared + mine, tl.zeros([CLEARED], tl.int32), mask=mine < num_cleared)
    if slots is not None:  # noqa: SIM102 - known at compile time, unlike the next
        if tl.load(slots + row) < 0:
            return
    numbers = made(x, residual, norm, factors, row, column, known, eps, stride_x, stride_residual, K, ACTIVATION)
    first = tl.program_id(1) * GROUPS
    store_groups(numbers, quantized, scales, row, first, stride_scales, K, GROUPS, GROUP, UNIT, FACTOR, LIMIT, SMALLEST)


def cleared_by_row(num_cleared: int, rows: int) -> int:
    """Zeros that the programs of one row write, a power of two."""
    return int(next_power_of_2(max(1, cdiv(num_cleared, rows))))


def quantize_groups(
    x: torch.Tensor,
    dtype: torch.dtype,
    overlap: bool,
    *,
    group: int | None,
    of: Made = AS_IT_IS,
    as_values: bool = False,
    slots: torch.Tensor | None = None,
    late: bool = False,
    multiple: int = 1,
    cleared: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``of(x) [T, K]`` in ``dtype``, and the scales of its groups.

    Args:
        x: in any dtype, with contiguous rows.
        dtype: a variant of e4m3.
        overlap: see :func:`atom_core.kernels.triton_support.overlaps`.
        group: elements of a row that share a scale, a power of two; None: all.
        of: the ops before.
        as_values: see :func:`atom_core.kernels.fp8_linear.quantize.scale_factor`.
        slots: int32 ``[T]``; rows where it is negative are skipped, and their results are undefined.
        late: the next kernel may not start before the kernels before this one are done.
        multiple: results have a multiple of this many rows; those past ``T`` are undefined.
        cleared: int32; set to zeros if there is a row.

    Returns:
        ``[T, K]``, and float32 ``[groups, T]``: a program of the product takes one group of many rows at once.
    """
    rows, size = len(x), of.size(x)
    assert x.stride(1) == 1
    group = group or next_power_of_2(size)
    groups = cdiv(size, group)
    padded = next_power_of_2(groups)
    if of.activation is not None:
        padded = min(padded, _GROUPS)
    all_rows = cdiv(rows, multiple) * multiple
    quantized = torch.empty(all_rows, size, dtype=dtype, device=x.device)
    scales = torch.empty(groups, all_rows, dtype=torch.float32, device=x.device)
    num_cleared = 0 if cleared is None else cleared.numel()
    if rows:
        _quantize_groups[(rows, cdiv(groups, padded))](
            x=x,
            slots=slots,
            cleared=cleared,
            quantized=quantized,
            scales=scales,
            stride_x=x.stride(0),
            stride_scales=all_rows,
            num_cleared=num_cleared,
            K=size,
            GROUP=group,
            GROUPS=padded,
            UNIT=unit_of(dtype),
            FACTOR=scale_factor(dtype, as_values),
            LIMIT=LIMIT,
            SMALLEST=SMALLEST,
            OVERLAP=overlap,
            LATE=late,
            CLEARED=cleared_by_row(num_cleared, rows),
            num_warps=min(16, max(1, group * padded // 512)),
            **of.arguments(),
            **launch_options(overlap),
        )
    return quantized, scales
