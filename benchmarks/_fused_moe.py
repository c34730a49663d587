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
    tokens: int, hidden: int, intermediate: int, top_k: int, quantized: Quantized, share: float = 1.0
) -> Iterator[Stage]:
    """aiter's kernels in order. The kernels add up the outputs of a token's experts in memory.

    Args:
        tokens: of the step.
        hidden, intermediate: the sizes of an expert on this rank.
        top_k: experts per token.
        quantized: the unit of a scale in FP8, or per_1x32 for MXFP4.
        share: the fraction of a token's experts that are local, on average.
    """
    routed_tokens = top_k * share

    def in_fp8(rows: float, size: int) -> float:
        return rows * (size + 4 * (1 if quantized == "per_Token" else size / 128))

    yield Stage("moe_sorting", "fused_moe.py:962", 12 * top_k)
    if quantized == "No":
        yield Stage("moe_stage1", "fused_moe.py:3250", 2 * (hidden + routed_tokens * intermediate))
        yield Stage("moe_stage2", "fused_moe.py:3366", 2 * routed_tokens * (intermediate + hidden))
        return
    if quantized == "per_1x32":
        yield from _in_mxfp4(tokens, 1, hidden, 2048 // top_k)
        yield Stage("moe_stage1", "fused_moe.py:3250", hidden * MXFP4 + 2 * routed_tokens * intermediate)
        yield from _in_mxfp4(tokens, routed_tokens, intermediate, 8192 // top_k)
        yield Stage("moe_stage2", "fused_moe.py:3366", routed_tokens * (intermediate * MXFP4 + 2 * hidden))
        return
    given = in_fp8(1, hidden)
    if tokens >= ONE_KERNEL_FROM[quantized]:
        yield Stage("quant", "fused_moe.py:1142", 2 * hidden + given)
        yield Stage("fmoe", "fused_moe.py:1206, 2396", given + 2 * routed_tokens * hidden)
        return
    between = in_fp8(routed_tokens, intermediate)
    yield Stage("quant", "fused_moe.py:3131", 2 * hidden + given)
    yield Stage("moe_stage1", "fused_moe.py:3250", given + 2 * routed_tokens * intermediate)
    yield Stage("quant", "fused_moe.py:3329", 2 * routed_tokens * intermediate + between)
    yield Stage("moe_stage2", "fused_moe.py:3366", between + 2 * routed_tokens * hidden)


def _in_mxfp4(tokens: int, rows: float, size: int, most: int) -> Iterator[Stage]:
    """Rounding ``rows`` of each token, and their scales in the order of experts: one kernel up to ``most`` tokens."""
    if tokens <= most:
        yield Stage("quant", "quant.py:1119", rows * size * (2 + MXFP4))
        return
    yield Stage("quant", "quant.py:1137", rows * size * (2 + MXFP4))
    yield Stage("sort_scales", "quant.py:1146", 2 * rows * size / 32)
