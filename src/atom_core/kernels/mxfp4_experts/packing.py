"""How the Hopper kernel keeps weights in MXFP4 and reads its inputs: both as e4m3, for which tensor cores are fast.

A byte holds two numbers of one row, of columns 32 apart, so that the first numbers of 32 bytes are one group, which
shares a scale, and the second ones another. The first has its sign and its three other bits where e4m3 has them, and
the second where two shifts bring them there: four numbers in a register take one instruction, or four. Read as e4m3
they are 2 ** -6 of what they were, the subnormal included. Of an odd last group the 16 bytes hold its halves.

An input is two numbers of e4m3, what its four leading bits are and what they leave, times its row's power of two.
Together they are the input in bfloat16, but for what is 2 ** -17 of a row's largest and less.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from atom_core.kernels.fp8_linear.quantize import norm_factor
from atom_core.kernels.linear.triton_kernel import Norm
from atom_core.kernels.mxfp4_linear.parts import rounded
from atom_core.kernels.triton_support import launch_options
from atom_core.quant.mxfp4 import GROUP

#: By which sums of products of :func:`pack`'s numbers are to be multiplied.
FACTOR = 64.0


def pack(blocks: torch.Tensor) -> None:
    """Move the bits of ``blocks``, uint8 ``[E, N, K / 2]`` as checkpoints have them, in place."""
    for rows in blocks:
        low, high = rows & 15, rows >> 4
        codes = torch.stack((low, high), -1).view(len(rows), -1, GROUP)
        pairs = codes.shape[1] // 2
        first, second = codes[:, : 2 * pairs : 2].flatten(1), codes[:, 1 : 2 * pairs : 2].flatten(1)
        if codes.shape[1] % 2:
            first = torch.cat((first, codes[:, -1, : GROUP // 2]), 1)
            second = torch.cat((second, codes[:, -1, GROUP // 2 :]), 1)
        first = ((first & 8) << 4) | ((first & 7) << 2)
        second = ((second & 8) << 2) | ((second & 4) << 4) | (second & 3)
        rows.copy_(first | second)


@triton.jit
def _split(
    x,
    norm,
    slots,
    out,
    scales,
    eps,
    stride_x,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    ROUNDED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One row: of each group the leading parts, then what they leave; see :func:`split`."""
    HALF: tl.constexpr = GROUP // 2
    NUMBER: tl.constexpr = K // GROUP
    row = tl.program_id(0).to(tl.int64)
    group, place = tl.arange(0, GROUPS)[:, None], tl.arange(0, GROUP)[None, :]
    column = group * GROUP + place
    known = column < K
    if norm is not None:
        factors = tl.load(norm + column, mask=known, other=0.0).to(tl.float32)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        # Not earlier: the product behind reads which experts they are without waiting for this kernel.
        tl.extra.cuda.gdc_launch_dependents()
    if slots is not None:  # noqa: SIM102 - decided when compiling; the other is not
        if tl.load(slots + row) < 0:
            return
    numbers = tl.load(x + row * stride_x + column, mask=known, other=0.0).to(tl.float32)
    if norm is not None:
        # rounded between norm and product, as the model defines them
        flat = tl.reshape(numbers, (GROUPS * GROUP,))
        numbers = (numbers * norm_factor(flat, K, eps) * factors).to(x.dtype.element_ty).to(tl.float32)
    if ROUNDED:
        numbers = rounded(numbers)
    # The largest lies between 2 ** 7 and 2 ** 8 then. A maximum may leave NaN out, a sum does not.
    bits = tl.max(tl.max(tl.abs(numbers), 1), 0).to(tl.int32, bitcast=True)
    exponent = tl.minimum(tl.maximum(bits >> 23, 8), 254) - 7
    finite = tl.sum(tl.sum(numbers * 0.0, 1), 0) == 0.0
    scale = (exponent << 23).to(tl.float32, bitcast=True)
    # The inverse of a power of two: exponents add up to that of 1 twice.
    numbers *= tl.where(finite, ((254 - exponent) << 23).to(tl.float32, bitcast=True), 0.0)
    leading = numbers.to(tl.float8e4nv)
    rest = (numbers - leading.to(tl.float32)).to(tl.float8e4nv)
    # An odd last group is in two: half of the first numbers of 32 bytes, and half of the second.
    odd = (group == NUMBER - 1) & (NUMBER % 2 == 1)
    behind = odd & (place >= HALF)
    at = out + row * ((NUMBER + NUMBER % 2) * 2 * GROUP)
    to = tl.where(behind, (group + 1) * 2 * GROUP + place - HALF, group * 2 * GROUP + place)
    tl.store(at + to, leading, mask=known)
    tl.store(at + to + GROUP, rest, mask=known)
    if NUMBER % 2 == 1:
        empty = tl.where(place < HALF, (group + 1) * 2 * GROUP + place + HALF, group * 2 * GROUP + place)
        zero = tl.zeros([GROUPS, GROUP], tl.float32).to(tl.float8e4nv)
        tl.store(at + empty, zero, mask=odd)
        tl.store(at + empty + GROUP, zero, mask=odd)
    tl.store(scales + row, tl.where(finite, scale, float("nan")))


def split(
    x: torch.Tensor, overlap: bool, *, rounds: bool, norm: Norm | None = None, slots: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """``norm(x)`` as the kernel reads it, and float32 ``[T]``, which its numbers are to be multiplied by.

    The first is float8_e4m3fn ``[T, K / 32, 2, 32]``, of an odd number of groups one more: the leading parts of each
    group's numbers, then what they leave.

    Args:
        x: ``[T, K]`` of contiguous rows, K a multiple of 32.
        overlap: see :func:`atom_core.kernels.triton_support.overlaps`. The next kernel may start when those in front of
            this one are done, and read what they wrote.
        rounds: round to MXFP4 first.
        norm: norm rows first of all.
        slots: int32 ``[T]``; rows where it is negative are left out, and what is returned for them means nothing.
    """
    rows, size = x.shape
    assert x.stride(1) == 1
    assert size % GROUP == 0
    number = size // GROUP
    out = torch.empty(rows, number + number % 2, 2, GROUP, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(rows, dtype=torch.float32, device=x.device)
    if rows:
        groups = triton.next_power_of_2(number)
        _split[(rows,)](
            x,
            None if norm is None else norm.weight,
            slots,
            out,
            scales,
            0.0 if norm is None else norm.eps,
            x.stride(0),
            K=size,
            GROUP=GROUP,
            GROUPS=groups,
            ROUNDED=rounds,
            OVERLAP=overlap,
            num_warps=min(16, max(1, GROUP * groups // 512)),
            **launch_options(overlap),
        )
    return out, scales
