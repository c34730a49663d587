"""What kernels of MXFP4 share: numbers and scales from their bits, and the way back."""

from __future__ import annotations

import triton
import triton.language as tl

from atom_core.kernels.mxfp4_linear import reference

_HALF = tl.constexpr(reference.HALF_OF_THAT_BIT)
_EXPONENT = tl.constexpr(reference.EXPONENT)
_AT = tl.constexpr(reference.EXPONENT_AT)
#: Added to a float32 of less than 2 ** 22 and taken away again, it leaves the nearest integer, of two the even one.
_INTEGERS = tl.constexpr(3.0 * 2**22)


@triton.jit
def number(code):
    """What e2m1's four bits stand for, times 2 ** -14, in float32.

    They are the sign, the last two bits of the exponent and the first of the mantissa of a float16, whose exponent
    counts from 14 less: so zero and the subnormal 0.5 come out right too.
    """
    bits = ((code & 8) << 12) | ((code & 7) << 9)
    return bits.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def scale_of(byte):
    """2 ** (byte - 127 + 14) in float32, which takes back what :func:`number` is short of; 0 for the byte 0."""
    return (byte.to(tl.int32) << 23).to(tl.float32, bitcast=True) * 16384.0


@triton.jit
def rounded(numbers):
    """Groups ``[G, 32]`` of float32 rounded to MXFP4; see :func:`.reference.round_groups`."""
    largest = tl.max(tl.abs(numbers), 1)
    bits = largest.to(tl.int32, bitcast=True)
    exponent = tl.maximum(((bits + _HALF) & _EXPONENT) >> _AT, 3) - 2
    # Maxima may leave NaN out, sums do not.
    finite = tl.sum(numbers * 0.0, 1) == 0.0
    scale = tl.where(finite, (exponent << _AT).to(tl.float32, bitcast=True), float("nan"))
    # The inverse of a power of two: exponents add up to that of 1 twice.
    inverse = tl.where(finite, ((254 - exponent) << _AT).to(tl.float32, bitcast=True), 0.0)
    size = tl.abs(numbers) * inverse[:, None]
    step = tl.where(size < 2.0, 0.5, tl.where(size < 4.0, 1.0, 2.0))
    steps = tl.where(size < 2.0, size * 2.0, tl.where(size < 4.0, size, size * 0.5))
    nearest = tl.minimum((steps + _INTEGERS - _INTEGERS) * step, 6.0)
    return tl.where(numbers < 0.0, -nearest, nearest) * scale[:, None]
