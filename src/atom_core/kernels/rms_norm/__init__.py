"""Root mean square norm (arXiv 1910.07467), with or without a residual that is added first.

    x = x + residual                     (if a residual is given; it is also returned)
    y = x / sqrt(mean(x^2) + eps) * weight

``x``, ``residual``: ``[T, N]`` of one dtype; ``weight``: ``[N]`` in that dtype or float32. Sums are float32 and rounded
once.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch

from atom_core.kernels.aiter_library import why_no_aiter
from atom_core.kernels.rms_norm.cpu import rms_norm as rms_norm_on_cpu
from atom_core.kernels.rms_norm.reference import rms_norm
from atom_core.kernels.select import Implementation, Op, Target, always, only_on_cpu
from atom_core.kernels.triton_support import overlaps, why_no_triton


@dataclass(frozen=True)
class RmsNormSpec:
    """One norm: its width and dtype."""

    size: int
    dtype: torch.dtype
    float32_weight: bool = False
    """Whether the weight is float32 where the dtype has 16 bits."""


#: Why libraries do not run norms whose weight is ``1 + w`` in float32.
FLOAT32_WEIGHT = "Its norms have weights in the model's dtype, and these are float32 (zero-centred norms)."


class RmsNormKernel(Protocol):
    """The call: ``(x, weight, eps, residual)`` to ``(y, new residual)``.

    Without a residual the second result is None. Inputs may be overwritten, so callers use only the results.
    """

    def __call__(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]: ...


def _aiter_supports(spec: RmsNormSpec, target: Target) -> str | None:
    if reason := why_no_aiter(target):
        return reason
    if spec.dtype not in (torch.bfloat16, torch.float16):
        return f"aiter's norm is for bfloat16 and float16, not for {spec.dtype}."
    if spec.float32_weight:
        return FLOAT32_WEIGHT
    return "aiter's norm is fast for rows of up to 8192 elements." if spec.size > 8192 else None


def _build_aiter(spec: RmsNormSpec, target: Target) -> RmsNormKernel:
    from atom_core.kernels.rms_norm.aiter_kernel import build  # imports aiter when it is built

    return build()


def _triton_supports(spec: RmsNormSpec, target: Target) -> str | None:
    if reason := why_no_triton(target):
        return reason
    return "The Triton kernel has rows of up to 32768 elements." if spec.size > 32768 else None


def _build_triton(spec: RmsNormSpec, target: Target) -> RmsNormKernel:
    from atom_core.kernels.rms_norm.triton_kernel import rms_norm as launch  # needs triton, which a CPU may lack

    return partial(launch, overlap=overlaps(target))


RMS_NORM: Op[RmsNormSpec, RmsNormKernel] = Op(
    "rms_norm",
    (
        Implementation("aiter", _aiter_supports, _build_aiter),
        Implementation("triton", _triton_supports, _build_triton),
        Implementation("torch", only_on_cpu, lambda spec, target: rms_norm_on_cpu),
        Implementation("reference", always, lambda spec, target: rms_norm),
    ),
)
