"""Matrix product with an FP8 weight that has a scale for each block of 128 by 128: ``y = x W^T + b``.

    y[t, n] = b[n] + sum over g of s_x[t, g] * s_w[n / 128, g] * (sum over k in group g of X[t, k] * W[n, k])

A group ``g`` has 128 elements of K, the last maybe fewer. ``x``: ``[T, K]`` and ``b``: ``[N]`` or None, of the model's
dtype; ``W``: ``[N, K]`` float8_e4m3fn; ``s_w``: float32 ``[ceil(N / 128), ceil(K / 128)]``; ``y``: ``[T, N]``. ``X`` is
``x / s_x`` in e4m3, where ``s_x`` is the largest magnitude of a token's group / 448. A kernel may leave a single token
unquantised.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from atom_core.kernels.aiter_library import why_no_aiter
from atom_core.kernels.fp8_block_linear.reference import ReferenceFp8BlockLinear
from atom_core.kernels.fp8_linear.scaled_mm import why_no_fp8
from atom_core.kernels.select import Implementation, Op, Target, always
from atom_core.kernels.triton_support import overlaps, why_no_triton
from atom_core.quant.fp8 import BLOCK_SIZE


@dataclass(frozen=True)
class Fp8BlockLinearSpec:
    """One product: ``in_features`` is K and ``out_features`` N, both of this rank; ``dtype`` is the model's."""

    in_features: int
    out_features: int
    bias: bool
    dtype: torch.dtype


class Fp8BlockLinearKernel(Protocol):
    """The product of one layer."""

    def adopt(self, weight: torch.Tensor, weight_scale: torch.Tensor) -> None:
        """Take over the loaded weight; a kernel may change bits without effect or reorder elements, in place."""

    def __call__(
        self, x: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """``x [T, K]`` to ``[T, N]``."""


@runtime_checkable
class FewRowsFp8BlockKernel(Protocol):
    """A product whose kernel for few rows can be fused with other ops."""

    max_rows: int

    def stored(self, weight: torch.Tensor) -> torch.Tensor:
        """The weight viewed in the device's variant of e4m3."""

    def add(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        weight_scale: torch.Tensor,
        bias: torch.Tensor | None,
        residual: torch.Tensor,
    ) -> torch.Tensor:
        """``residual += y``, rounded once, for at most ``max_rows`` rows; ``residual`` is contiguous."""


def _aiter_supports(spec: Fp8BlockLinearSpec, target: Target) -> str | None:
    if reason := why_no_aiter(target):
        return reason
    if spec.dtype != torch.bfloat16:
        return f"aiter's FP8 products are used in models of bfloat16, not of {spec.dtype}."
    # Where none was tuned, its kernel has tiles of 64 outputs, as those tuned for DeepSeek's 2112, and no masks.
    if spec.in_features % BLOCK_SIZE or spec.out_features % 64:
        return (
            f"aiter's FP8 product in blocks wants inputs in multiples of {BLOCK_SIZE} and outputs in multiples of 64, "
            f"not {spec.in_features} and {spec.out_features}."
        )
    return None


def _build_aiter(spec: Fp8BlockLinearSpec, target: Target) -> Fp8BlockLinearKernel:
    from atom_core.kernels.fp8_block_linear.aiter_kernel import AiterFp8BlockLinear  # imported only when chosen

    return AiterFp8BlockLinear(spec, target)


def _triton_supports(spec: Fp8BlockLinearSpec, target: Target) -> str | None:
    return why_no_triton(target) or why_no_fp8(target)


def _build_triton(spec: Fp8BlockLinearSpec, target: Target) -> Fp8BlockLinearKernel:
    from atom_core.kernels.fp8_block_linear.triton_kernel import TritonFp8BlockLinear  # a CPU may lack triton

    return TritonFp8BlockLinear(target, overlaps(target), spec.dtype)


FP8_BLOCK_LINEAR: Op[Fp8BlockLinearSpec, Fp8BlockLinearKernel] = Op(
    "fp8_block_linear",
    (
        Implementation("aiter", _aiter_supports, _build_aiter),
        Implementation("triton", _triton_supports, _build_triton),
        Implementation("reference", always, lambda spec, target: ReferenceFp8BlockLinear()),
    ),
)
