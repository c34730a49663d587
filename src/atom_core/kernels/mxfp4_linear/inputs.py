"""Prepare the input of a product with MXFP4: optionally an RMS norm, optionally rounding, and reordering."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from atom_core.kernels.eviction import EVICT_LAST
from atom_core.kernels.fp8_linear.quantize import norm_factor
from atom_core.kernels.launch import entry_kernel
from atom_core.kernels.linear.triton_kernel import Norm
from atom_core.kernels.mxfp4_linear.conversion import rounded
from atom_core.kernels.triton_support import launch_options, next_power_of_2
from atom_core.quant.mxfp4 import GROUP


@entry_kernel
@triton.jit
def _prepare(
    x,
    norm,
    slots,
    out,
    eps,
    stride_x,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    ROUNDED: tl.constexpr,
    PLANES: tl.constexpr,
    OVERLAP: tl.constexpr,
    LATE: tl.constexpr,
):
    """One row."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, GROUPS * GROUP)
    known = column < K
    if norm is not None:
        factors = tl.load(norm + column, mask=known, other=0.0).to(tl.float32)
    if OVERLAP and not LATE:
        tl.extra.cuda.gdc_launch_dependents()
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    if OVERLAP and LATE:
        tl.extra.cuda.gdc_launch_dependents()
    if slots is not None:  # noqa: SIM102 - known at compile time, unlike the next
        if tl.load(slots + row) < 0:
            return
    numbers = tl.load(x + row * stride_x + column, mask=known, other=0.0).to(tl.float32)
    if norm is not None:
        # The model defines a rounding between the norm and the groups.
        numbers = (numbers * norm_factor(numbers, K, eps) * factors).to(x.dtype.element_ty).to(tl.float32)
    if ROUNDED:
        numbers = tl.reshape(rounded(tl.reshape(numbers, (GROUPS, GROUP))), (GROUPS * GROUP,))
    column = column % PLANES * (K // PLANES) + column // PLANES
    tl.store(out + row * K + column, numbers.to(out.dtype.element_ty), mask=known, eviction_policy=EVICT_LAST)


def prepare(
    x: torch.Tensor,
    overlap: bool,
    *,
    rounds: bool,
    planes: int = 2,
    norm: Norm | None = None,
    slots: torch.Tensor | None = None,
    late: bool = False,
) -> torch.Tensor:
    """``norm(x) [T, K]`` in its own dtype.

    Args:
        x: of contiguous rows; K is a multiple of 32.
        overlap: see :func:`atom_core.kernels.triton_support.overlaps`.
        rounds: round to MXFP4.
        planes: planes into which rows are reordered: elements 0, ``planes``, 2 ``planes``, ... first, then 1, ...; 2
            planes fit the two halves of a weight's bytes.
        norm: the RMS norm to apply first.
        slots: int32 ``[T]``; rows where it is negative are skipped, and their results are undefined.
        late: the next kernel may not start before the kernels before this one are done, so it can read their results.
    """
    rows, size = x.shape
    assert x.stride(1) == 1
    assert size % GROUP == 0
    out = torch.empty(rows, size, dtype=x.dtype, device=x.device)
    if rows:
        groups = next_power_of_2(size // GROUP)
        _prepare[(rows,)](
            x,
            None if norm is None else norm.weight,
            slots,
            out,
            0.0 if norm is None else norm.eps,
            x.stride(0),
            K=size,
            GROUP=GROUP,
            GROUPS=groups,
            ROUNDED=rounds,
            PLANES=planes,
            OVERLAP=overlap,
            LATE=late,
            num_warps=min(16, max(1, GROUP * groups // 512)),
            **launch_options(overlap),
        )
    return out
