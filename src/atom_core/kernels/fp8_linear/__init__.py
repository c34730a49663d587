"""Matrix product with a weight in FP8: ``y = (s_x * X) (s_w * W)^T + b``.

``x``: ``[T, K]`` and ``b``: ``[N]`` or None, of the model's dtype; ``W``: ``[N, K]`` float8_e4m3fn; ``s_w``: float32
``[N]``, one scale per row whatever the checkpoint has; ``y``: ``[T, N]``. ``X`` is ``x / s_x`` in e4m3, clamped to its
range (448). ``s_x`` is the checkpoint's (static), or each token's largest magnitude / 448 (dynamic). A kernel may leave
a single token unquantised.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from atom_core.kernels.aiter_library import why_no_aiter
from atom_core.kernels.fp8_linear.reference import ReferenceFp8Linear
from atom_core.kernels.fp8_linear.scaled_mm import ScaledMm, why_no_scaled_mm
from atom_core.kernels.select import Implementation, Op, Target, always
from atom_core.kernels.triton_support import overlaps, remark_on_few_rows, why_no_triton
from atom_core.quant.fp8 import InputScale


@dataclass(frozen=True)
class Fp8LinearSpec:
    """One product: ``in_features`` is K and ``out_features`` N, both of this rank; ``dtype`` is the model's."""

    in_features: int
    out_features: int
    bias: bool
    dtype: torch.dtype
    input_scale: InputScale


class Fp8LinearKernel(Protocol):
    """The product of one layer."""

    def adopt(self, weight: torch.Tensor, weight_scale: torch.Tensor) -> None:
        """Take over loaded weights; a kernel may change bits without effect or reorder elements, in place."""

    def __call__(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        weight_scale: torch.Tensor,
        input_scale: torch.Tensor | None,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        """``x [T, K]`` to ``[T, N]``; ``input_scale`` is float32 ``[1]``, or None where each token has its own."""


@runtime_checkable
class FewRowsFp8Kernel(Protocol):
    """A product whose kernel for few rows can be fused with other ops."""

    max_rows: int

    def stored(self, weight: torch.Tensor) -> torch.Tensor:
        """The weight viewed in the device's variant of e4m3."""

    def add(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        weight_scale: torch.Tensor,
        input_scale: torch.Tensor | None,
        bias: torch.Tensor | None,
        residual: torch.Tensor,
    ) -> torch.Tensor:
        """``residual += y``, rounded once, for at most ``max_rows`` rows; ``residual`` is contiguous."""


def _aiter_supports(spec: Fp8LinearSpec, target: Target) -> str | None:
    if reason := why_no_aiter(target):
        return reason
    if spec.dtype != torch.bfloat16:
        return f"aiter's FP8 products are used in models of bfloat16, not of {spec.dtype}."
    if spec.in_features % 32 or spec.out_features % 16:
        return (
            "aiter's FP8 product wants inputs in multiples of 32 and outputs in multiples of 16, "
            f"not {spec.in_features} and {spec.out_features}."
        )
    return None


def _build_aiter(spec: Fp8LinearSpec, target: Target) -> Fp8LinearKernel:
    from atom_core.kernels.fp8_linear.aiter_kernel import AiterFp8Linear  # imported only when chosen

    return AiterFp8Linear(spec, target)


def _scaled_mm_supports(spec: Fp8LinearSpec, target: Target) -> str | None:
    return why_no_scaled_mm(spec.in_features, spec.out_features, target)


def _triton_supports(spec: Fp8LinearSpec, target: Target) -> str | None:
    if reason := why_no_triton(target):
        return reason
    if spec.dtype not in (torch.bfloat16, torch.float16):
        return f"The Triton kernel is for inputs of two bytes, not for {spec.dtype}."
    return _scaled_mm_supports(spec, target)  # which computes products of many rows


def _build_triton(spec: Fp8LinearSpec, target: Target) -> Fp8LinearKernel:
    from atom_core.kernels.fp8_linear.triton_kernel import TritonFp8Linear  # needs triton, which a CPU may lack

    return TritonFp8Linear(target, overlaps(target), spec.dtype if spec.input_scale == "dynamic" else None, spec)


FP8_LINEAR: Op[Fp8LinearSpec, Fp8LinearKernel] = Op(
    "fp8_linear",
    (
        Implementation("aiter", _aiter_supports, _build_aiter),
        Implementation("triton", _triton_supports, _build_triton, remark_on_few_rows),
        Implementation("scaled_mm", _scaled_mm_supports, lambda spec, target: ScaledMm(target)),
        Implementation("reference", always, lambda spec, target: ReferenceFp8Linear()),
    ),
)
