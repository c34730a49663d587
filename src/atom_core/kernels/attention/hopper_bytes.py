"""Keys and values in FP8 for tensor cores on Hopper, in Gluon: two adjacent elements are one word of 16 bits.

A tile of words is loaded to the registers of a left operand. The first elements of all words form one operand, the
second elements another, and the other side of the product has the same order, so threads exchange nothing and no 16-bit
form of the cache is in memory. Where words lie transposed, a thread has words of adjacent tokens, and of each word the
same two elements; so this holds for keys and for values.

A code's exponent and mantissa are moved to those of bfloat16 or float16, where they mean the value times a power of 2,
also for subnormals; a multiplication by its inverse is exact. Codes of infinity and NaN, which a cache has from such
inputs alone, become large numbers, but for those of e5m2 in float16, whose codes begin alike.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


def _instructions(second: bool, shift: int, magnitude: int, factor: int | None, kind: str) -> str:
    """PTX that makes two elements of 16 bits in ``$0`` of those of two words in ``$1``.

    Args:
        second: whether each word's second element is taken, its upper byte; else its lower.
        shift: how far the lower byte's exponent and mantissa are moved up.
        magnitude: the bits that they then take, in 16 bits.
        factor: what the result is multiplied by, as 16 bits; None: by 1.
        kind: of the result, "bf16" or "f16".
    """
    up = shift - 8 if second else shift
    moved = f"shl.b32 number, $1, {up};" if up >= 0 else f"shr.u32 number, $1, {-up};"
    sign = "mov.b32 sign, $1;" if second else "shl.b32 sign, $1, 8;"
    both = magnitude << 16 | magnitude
    code = f"{{ .reg .b32 number, sign; {moved} {sign} and.b32 number, number, {both:#010x}; "
    code += "and.b32 sign, sign, 0x80008000; "
    if factor is None:
        return code + "or.b32 $0, number, sign; }"
    code += f"or.b32 number, number, sign; mov.b32 sign, {factor << 16 | factor:#010x}; "
    return code + f"mul.rn.{kind}x2 $0, number, sign; }}"


def _both(shift: int, magnitude: int, factor: int | None, kind: str) -> tuple[str, str]:
    return _instructions(False, shift, magnitude, factor, kind), _instructions(True, shift, magnitude, factor, kind)


#: By the cache's exponent bits and the result's: instructions for the first and for the second elements. Factors are
#: 2 ** 120, 2 ** 112 and 2 ** 8.
INSTRUCTIONS = {
    (4, 8): _both(4, 0x07F0, 0x7B80, "bf16"),
    (5, 8): _both(5, 0x0FE0, 0x7780, "bf16"),
    (4, 5): _both(7, 0x3F80, 0x5C00, "f16"),
    (5, 5): _both(8, 0x7F00, None, "f16"),
}


@gluon.constexpr_function
def instructions(cache, dtype, second):
    """Of :data:`INSTRUCTIONS`, for elements of a cache and for a product's dtype."""
    return INSTRUCTIONS[5 if "e5" in str(cache) else 4, 8 if "bf16" in str(dtype) else 5][second]


@gluon.jit
def elements(words, SECOND: gl.constexpr, cache: gl.constexpr, dtype: gl.constexpr):
    """The first or the second elements of words, exactly, in ``dtype``; a thread has two words side by side."""
    code: gl.constexpr = instructions(cache, dtype, SECOND)
    # A type that is an argument of ours is none for this function.
    if dtype == gl.bfloat16:
        result = gl.inline_asm_elementwise(code, "=r,r", [words], dtype=gl.bfloat16, is_pure=True, pack=2)
    else:
        result = gl.inline_asm_elementwise(code, "=r,r", [words], dtype=gl.float16, is_pure=True, pack=2)
    return result
