"""MXFP4 in torch, as it is defined: conversion of packed values, rounding, and the product."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from atom_core.quant.mxfp4 import GROUP

_POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
#: The values of the sixteen codes.
NUMBERS = (*_POSITIVE, *(-number for number in _POSITIVE))
#: Added to the bits of a float32 that is then truncated, it rounds to e2m1's single mantissa bit.
HALF_OF_THAT_BIT = 0x200000
#: The exponent mask of a float32's bits, and its shift.
EXPONENT, EXPONENT_AT = 0x7F800000, 23


def dequantize(blocks: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``[.., K]`` in ``dtype`` of ``blocks [.., K / 2]`` and ``scales [.., K / 32]``."""
    codes = torch.stack((blocks & 15, blocks >> 4), -1).flatten(-2)
    numbers = torch.tensor(NUMBERS, device=blocks.device)[codes.int()].view(*scales.shape, -1)
    return torch.ldexp(numbers, (scales.int() - 127)[..., None]).flatten(-2).to(dtype)


def requantize(weight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Undo :func:`dequantize`: ``blocks [.., K / 2]`` from ``weight [.., K]`` and ``scales [.., K / 32]``."""
    numbers = torch.ldexp(_grouped(weight), (127 - scales.int())[..., None]).flatten(-2)
    positive = torch.tensor(_POSITIVE, device=weight.device)
    codes = torch.bucketize(numbers.abs(), (positive[1:] + positive[:-1]) / 2) | torch.signbit(numbers).int() << 3
    codes = codes.to(torch.uint8)
    return codes[..., ::2] | codes[..., 1::2] << 4


def _grouped(x: torch.Tensor) -> torch.Tensor:
    """float32 ``[.., K / 32, 32]``."""
    return x.float().reshape(*x.shape[:-1], x.shape[-1] // GROUP, GROUP)


def group_scales(x: torch.Tensor) -> torch.Tensor:
    """The scales of the groups of ``x [.., K]``, float32 ``[.., K / 32]``; infinite or NaN where an element is."""
    largest = _grouped(x).abs().amax(-1)
    exponent = (largest.view(torch.int32) + HALF_OF_THAT_BIT & EXPONENT) >> EXPONENT_AT
    scales = (exponent - 2).clamp_min(1) << EXPONENT_AT
    return scales.view(torch.float32).where(torch.isfinite(largest), largest)


def round_groups(x: torch.Tensor) -> torch.Tensor:
    """``x [.., K]`` rounded to MXFP4, in its own dtype."""
    scales = group_scales(x)[..., None]
    numbers = _grouped(x) / scales
    # e2m1 values below 2 are 0.5 apart, those below 4 by 1, and those above by 2.
    step = torch.where(numbers.abs() < 2, 0.5, torch.where(numbers.abs() < 4, 1.0, 2.0))
    nearest = ((numbers / step).round() * step).clamp(-6.0, 6.0)
    return (nearest * scales).view(x.shape).to(x.dtype)


class ReferenceMxfp4Linear:
    """See :mod:`atom_core.kernels.mxfp4_linear`. Each call converts the whole weight.

    ``rounded_inputs``: round inputs to MXFP4.
    """

    def __init__(self, rounded_inputs: bool) -> None:
        self.rounded_inputs = rounded_inputs

    def adopt(self, blocks: torch.Tensor, scales: torch.Tensor) -> None:
        """Weights stay as they are."""

    def __call__(
        self, x: torch.Tensor, blocks: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """``x [T, K]`` to ``[T, N]``."""
        if self.rounded_inputs:
            x = round_groups(x)
        return F.linear(x, dequantize(blocks, scales, x.dtype), bias)
