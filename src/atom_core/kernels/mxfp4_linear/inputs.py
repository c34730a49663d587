"""What comes in front of a product with MXFP4: a norm where there is one, rounding where asked for, and order."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from atom_core.kernels.eviction import EVICT_LAST
from atom_core.kernels.fp8_linear.quantize import norm_factor
from atom_core.kernels.linear.triton_kernel import Norm
from atom_core.kernels.mxfp4_linear.parts import rounded
from atom_core.kernels.triton_support import launch_options
from atom_core.quant.mxfp4 import GROUP


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
    PARTS: tl.constexpr,
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
    if slots is not None:  # noqa: SIM102 - decided when compiling; the other is not
        if tl.load(slots + row) < 0:
            return
    numbers = tl.load(x + row * stride_x + column, mask=known, other=0.0).to(tl.float32)
    if norm is not None:
        # rounded between norm and groups, as the model defines them
        numbers = (numbers * norm_factor(numbers, K, eps) * factors).to(x.dtype.element_ty).to(tl.float32)
    if ROUNDED:
        numbers = tl.reshape(rounded(tl.reshape(numbers, (GROUPS, GROUP))), (GROUPS * GROUP,))
    column = column % PARTS * (K // PARTS) + column // PARTS
    tl.store(out + row * K + column, numbers.to(out.dtype.element_ty), mask=known, eviction_policy=EVICT_LAST)


def prepare(
    x: torch.Tensor,
    overlap: bool,
    *,
    rounds: bool,
    parts: int = 2,
    norm: Norm | None = None,
    slots: torch.Tensor | None = None,
    late: bool = False,
) -> torch.Tensor:
    """``norm(x) [T, K]`` in its own dtype.

    Args:
        x: of contiguous rows, K a multiple of 32.
        overlap: see :func:`atom_core.kernels.triton_support.overlaps`.
        rounds: round to MXFP4.
        parts: the first of each so many numbers of a row are in front of the second ones, and so on: with 2, as halves
            of a weight's bytes are multiplied.
        norm: norm rows first.
        slots: int32 ``[T]``; rows where it is negative are left out, and what is returned for them means nothing.
        late: the next kernel may start when those in front of this one are done, and read what they wrote.
    """
    rows, size = x.shape
    assert x.stride(1) == 1
    assert size % GROUP == 0
    out = torch.empty(rows, size, dtype=x.dtype, device=x.device)
    if rows:
        groups = triton.next_power_of_2(size // GROUP)
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
            PARTS=parts,
            OVERLAP=overlap,
            LATE=late,
            num_warps=min(16, max(1, GROUP * groups // 512)),
            **launch_options(overlap),
        )
    return out
