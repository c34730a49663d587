"""The dtypes of KV caches, and quantisation to the 8-bit ones.

A cache has the model's dtype or an FP8 dtype. In FP8 it stores ``x / scale``, clamped to the range of the dtype: a bare
cast gives NaN or infinity beyond it. Reads multiply by the scale. ``e4m3fn`` and ``e5m2`` are OCP's
(https://www.opencompute.org/documents/ocp-8-bit-floating-point-specification-ofp8-revision-1-0-2023-12-01-pdf-1);
AMD's gfx942 computes with ``e4m3fnuz``.
"""

from __future__ import annotations

import torch

FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz)


def saturation_limit(dtype: torch.dtype) -> float | None:
    """The largest value of an FP8 dtype; None for other dtypes, which are not clamped."""
    return torch.finfo(dtype).max if dtype in FP8_DTYPES else None


def is_foreign(dtype: torch.dtype, arch: str) -> bool:
    """Whether an AMD GPU has no instructions for an FP8 dtype. Widening it takes many, and registers."""
    return arch == "gfx942" and dtype in FP8_DTYPES and dtype != torch.float8_e4m3fnuz


def quantize(x: torch.Tensor, scale: float, dtype: torch.dtype) -> torch.Tensor:
    """``x / scale`` in a cache's ``dtype``, rounded once; NaN stays NaN."""
    if scale != 1.0:
        x = x.float() / scale
    if dtype in FP8_DTYPES:
        limit = torch.finfo(dtype).max
        x = x.clamp(-limit, limit)
    return x.to(dtype)


def as_bytes(x: torch.Tensor) -> torch.Tensor:
    """A view for copies and indexing, which torch does not support for FP8 on every device."""
    return x.view(torch.uint8) if x.dtype in FP8_DTYPES else x


def why_unreadable(dtype: torch.dtype) -> str | None:
    """Why plain torch cannot read and write a cache of ``dtype``, or None."""
    if (dtype.is_floating_point and dtype.itemsize > 1) or dtype in FP8_DTYPES:
        return None
    return f"A cache has a floating-point dtype of 16 bits or more, or an FP8 one, not {dtype}."
