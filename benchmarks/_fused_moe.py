"""What aiter's ``fused_moe`` launches where no table has a tuned kernel, as aiter has it at e4048607."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

Quantized = Literal["No", "per_Token", "per_1x128", "per_1x32"]

#: Tokens from which on both products are one kernel, of those in FP8.
ONE_KERNEL_FROM = {"per_1x128": 33, "per_Token": 17}

#: Bytes of a number in MXFP4, with its share of a scale.
MXFP4 = 17 / 32


class Stage(NamedTuple):
    """One kernel of it."""

    name: str
    source: str
    activations: float
    """Bytes that it reads and writes for each token."""


def stages(
    tokens: int, hidden: int, middle: int, top_k: int, quantized: Quantized, share: float = 1.0
) -> Iterator[Stage]:
    """Its kernels in order. Each of a token's experts adds its answer to the others' in memory.

    Args:
        tokens: of the step.
        hidden, middle: the sizes of an expert, as a rank has it.
        top_k: experts of a token.
        quantized: what has a scale, in FP8, or where that is 32 numbers in MXFP4.
        share: of a token's experts those that the rank holds, on average.
    """
    pairs = top_k * share

    def in_fp8(rows: float, size: int) -> float:
        return rows * (size + 4 * (1 if quantized == "per_Token" else size / 128))

    yield Stage("moe_sorting", "fused_moe.py:962", 12 * top_k)
    if quantized == "No":
        yield Stage("moe_stage1", "fused_moe.py:3250", 2 * (hidden + pairs * middle))
        yield Stage("moe_stage2", "fused_moe.py:3366", 2 * pairs * (middle + hidden))
        return
    if quantized == "per_1x32":
        yield from _in_mxfp4(tokens, 1, hidden, 2048 // top_k)
        yield Stage("moe_stage1", "fused_moe.py:3250", hidden * MXFP4 + 2 * pairs * middle)
        yield from _in_mxfp4(tokens, pairs, middle, 8192 // top_k)
        yield Stage("moe_stage2", "fused_moe.py:3366", pairs * (middle * MXFP4 + 2 * hidden))
        return
    given = in_fp8(1, hidden)
    if tokens >= ONE_KERNEL_FROM[quantized]:
        yield Stage("quant", "fused_moe.py:1142", 2 * hidden + given)
        yield Stage("fmoe", "fused_moe.py:1206, 2396", given + 2 * pairs * hidden)
        return
    between = in_fp8(pairs, middle)
    yield Stage("quant", "fused_moe.py:3131", 2 * hidden + given)
    yield Stage("moe_stage1", "fused_moe.py:3250", given + 2 * pairs * middle)
    yield Stage("quant", "fused_moe.py:3329", 2 * pairs * middle + between)
    yield Stage("moe_stage2", "fused_moe.py:3366", between + 2 * pairs * hidden)


def _in_mxfp4(tokens: int, rows: float, size: int, most: int) -> Iterator[Stage]:
    """Rounding ``rows`` of each token, and their scales in the order of experts: one kernel up to ``most`` tokens."""
    if tokens <= most:
        yield Stage("quant", "quant.py:1119", rows * size * (2 + MXFP4))
        return
    yield Stage("quant", "quant.py:1137", rows * size * (2 + MXFP4))
    yield Stage("sort_scales", "quant.py:1146", 2 * rows * size / 32)
