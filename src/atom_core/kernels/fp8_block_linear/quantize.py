"""Activations in FP8 with a scale for each group of a row's numbers, with what makes them in front."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from atom_core.kernels.eviction import EVICT_LAST
from atom_core.kernels.fp8_linear.quantize import AS_IT_IS, Made, made, narrowed, unit_of
from atom_core.kernels.fp8_linear.reference import LIMIT, SMALLEST
from atom_core.kernels.triton_support import launch_options

#: Groups of a row for a program, where it need not know the whole row.
_GROUPS = 16


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
    if slots is not None:  # noqa: SIM102 - decided when compiling; the other is not
        if tl.load(slots + row) < 0:
            return
    numbers = made(x, residual, norm, factors, row, column, known, eps, stride_x, stride_residual, K, ACTIVATION)
    grouped = tl.reshape(numbers, (GROUPS, GROUP))
    scale = tl.div_rn(tl.maximum(tl.max(tl.abs(grouped), 1), SMALLEST), LIMIT)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    tl.store(
        scales + group.to(tl.int64) * stride_scales + row,
        scale * (UNIT * UNIT),
        mask=group * GROUP < K,
        eviction_policy=EVICT_LAST,
    )
    inverse = tl.div_rn(1.0, scale * UNIT)
    stored = narrowed(grouped, inverse[:, None], LIMIT, UNIT, quantized.dtype.element_ty)
    tl.store(
        quantized + row * K + column, tl.reshape(stored, (GROUPS * GROUP,)), mask=known, eviction_policy=EVICT_LAST
    )


def quantize_groups(
    x: torch.Tensor,
    dtype: torch.dtype,
    overlap: bool,
    *,
    group: int | None,
    of: Made = AS_IT_IS,
    slots: torch.Tensor | None = None,
    late: bool = False,
    multiple: int = 1,
    cleared: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``of(x) [T, K]`` in ``dtype``, and the scales of its groups, which go with a product of e4m3fn's bits.

    Args:
        x: in any dtype, of contiguous rows.
        dtype: a form of e4m3. In e4m3fnuz the bits of both sides of a product are half of what they are in e4m3fn, so
            scales have a factor of two times two.
        overlap: see :func:`atom_core.kernels.triton_support.overlaps`.
        group: numbers of a row that share a scale, a power of two; None: all.
        of: what makes the numbers, of ``x``.
        slots: int32 ``[T]``; rows where it is negative are left out, and what is returned for them means nothing.
        late: the kernel behind may start when those in front of this one are done, not earlier.
        multiple: what is returned has rows to a multiple of this; those behind ``T`` mean nothing.
        cleared: int32; written to, all zeros when there is a row.

    Returns:
        ``[T, K]``, and float32 ``[groups, T]``: programs that multiply take a group of many rows at once.
    """
    rows, size = len(x), of.size(x)
    assert x.stride(1) == 1
    group = group or triton.next_power_of_2(size)
    groups = triton.cdiv(size, group)
    padded = triton.next_power_of_2(groups)
    if of.activation is not None:
        padded = min(padded, _GROUPS)
    all_rows = triton.cdiv(rows, multiple) * multiple
    quantized = torch.empty(all_rows, size, dtype=dtype, device=x.device)
    scales = torch.empty(groups, all_rows, dtype=torch.float32, device=x.device)
    num_cleared = 0 if cleared is None else cleared.numel()
    if rows:
        _quantize_groups[(rows, triton.cdiv(groups, padded))](
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
            LIMIT=LIMIT,
            SMALLEST=SMALLEST,
            OVERLAP=overlap,
            LATE=late,
            CLEARED=triton.next_power_of_2(max(1, triton.cdiv(num_cleared, rows))),
            num_warps=min(16, max(1, group * padded // 512)),
            **of.arguments(),
            **launch_options(overlap),
        )
    return quantized, scales
