"""Conversion of MXFP4 values and scales from their bits and back, for kernels."""

from __future__ import annotations

import triton
import triton.language as tl

from atom_core.kernels.mxfp4_linear import reference

_HALF = tl.constexpr(reference.HALF_OF_THAT_BIT)
_EXPONENT = tl.constexpr(reference.EXPONENT)
_AT = tl.constexpr(reference.EXPONENT_AT)
#: Added to a float32 below 2 ** 22 and subtracted again, it rounds to the nearest integer, ties to even.
_INTEGERS = tl.constexpr(3.0 * 2**22)


@triton.jit
def number(code):
    """The value of e2m1's four bits, times 2 ** -14, in float32.

    They are put into the sign, the last two exponent bits and the first mantissa bit of a float16, whose exponent bias
    is larger by 14: so zero and the subnormal 0.5 are right too.
    """
    bits = ((code & 8) << 12) | ((code & 7) << 9)
    return bits.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def scale_of(byte):
    """2 ** (byte - 127 + 14) in float32, which compensates the factor of :func:`number`; 0 for the byte 0."""
    return (byte.to(tl.int32) << 23).to(tl.float32, bitcast=True) * 16384.0


@triton.jit
def rounded(numbers):
    """Round groups ``[G, 32]`` of float32 to MXFP4; see :func:`.reference.round_groups`."""
    largest = tl.max(tl.abs(numbers), 1)
    bits = largest.to(tl.int32, bitcast=True)
    exponent = tl.maximum(((bits + _HALF) & _EXPONENT) >> _AT, 3) - 2
    # Maxima may drop NaN, sums do not.
    finite = tl.sum(numbers * 0.0, 1) == 0.0
    scale = tl.where(finite, (exponent << _AT).to(tl.float32, bitcast=True), float("nan"))
    # The exponents of a power of two and its inverse add up to twice the bias.
    inverse = tl.where(finite, ((254 - exponent) << _AT).to(tl.float32, bitcast=True), 0.0)
    size = tl.abs(numbers) * inverse[:, None]
    step = tl.where(size < 2.0, 0.5, tl.where(size < 4.0, 1.0, 2.0))
    steps = tl.where(size < 2.0, size * 2.0, tl.where(size < 4.0, size, size * 0.5))
    nearest = tl.minimum((steps + _INTEGERS - _INTEGERS) * step, 6.0)
    return tl.where(numbers < 0.0, -nearest, nearest) * scale[:, None]
