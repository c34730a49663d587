"""Matrix product with a weight in MXFP4: ``y = x W^T + b``.

A value has four bits (e2m1: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives); 32 of a row share a scale, a power of two
in one byte (e8m0). See the OCP Microscaling Formats specification, version 1.0. ``blocks``: uint8 ``[N, K / 2]``, the
first of two values in a byte's lower half; ``scales``: uint8 ``[N, K / 32]``, 127 for 1:

    W[n, k] = e2m1(blocks[n, k / 2]) * 2 ** (scales[n, k / 32] - 127)

``x``: ``[T, K]`` and ``b``: ``[N]`` or None, of the model's dtype; ``y``: ``[T, N]``. With rounded inputs, ``x`` is
rounded to MXFP4 and then has the model's dtype again. Each 32 elements of a token have the scale

    2 ** (floor(log2(a)) - 2),  a = their largest magnitude, rounded to one bit after the first

and each becomes the nearest e2m1 value (ties to even, magnitudes clamped to 6): AMD Quark's "even". 32 elements of
which one is not finite become NaN. Products are those of the model's dtype. Weights stay packed: kernels convert them
to the model's dtype in registers, or multiply MXFP4 by MXFP4.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from atom_core.kernels.aiter_library import why_no_aiter
from atom_core.kernels.mxfp4_linear.reference import ReferenceMxfp4Linear
from atom_core.kernels.select import Implementation, Op, Target, always
from atom_core.kernels.triton_support import overlaps, why_no_triton


@dataclass(frozen=True)
class Mxfp4LinearSpec:
    """One product: ``in_features`` is K and ``out_features`` N, both of this rank; ``dtype`` is the model's."""

    in_features: int
    out_features: int
    bias: bool
    rounded_inputs: bool
    dtype: torch.dtype


class Mxfp4LinearKernel(Protocol):
    """The product of one layer."""

    def adopt(self, blocks: torch.Tensor, scales: torch.Tensor) -> None:
        """Take over the loaded weight; a kernel may reorder the bytes of ``blocks`` in place."""

    def __call__(
        self, x: torch.Tensor, blocks: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """``x [T, K]`` to ``[T, N]``."""


@runtime_checkable
class FewRowsMxfp4Kernel(Protocol):
    """A product whose kernel for few rows can be fused with other ops."""

    max_rows: int

    def add(
        self,
        x: torch.Tensor,
        blocks: torch.Tensor,
        scales: torch.Tensor,
        bias: torch.Tensor | None,
        residual: torch.Tensor,
    ) -> torch.Tensor:
        """``residual += y``, rounded once, for at most ``max_rows`` rows; ``residual`` is contiguous."""


def _aiter_supports(spec: Mxfp4LinearSpec, target: Target) -> str | None:
    if reason := why_no_aiter(target) or why_no_fp4(target):
        return reason
    if not spec.rounded_inputs:
        return "aiter multiplies MXFP4 by MXFP4, and this checkpoint's activations are not rounded to it."
    if spec.dtype != torch.bfloat16:
        return f"aiter's FP4 products are used in models of bfloat16, not of {spec.dtype}."
    # aiter reads scales for 256 elements of 32 rows at a time.
    if spec.in_features % 256 or spec.out_features % 32:
        return (
            "aiter's FP4 product is used for inputs that are multiples of 256 and outputs that are multiples of 32, "
            f"not {spec.in_features} and {spec.out_features}."
        )
    return None


def why_no_fp4(target: Target) -> str | None:
    """None where the device multiplies MXFP4 directly, else the reason; ``target`` is one of aiter's."""
    return None if target.arch == "gfx950" else f"FP4 is multiplied on gfx950, not on {target.arch}."


def _build_aiter(spec: Mxfp4LinearSpec, target: Target) -> Mxfp4LinearKernel:
    from atom_core.kernels.mxfp4_linear.aiter_kernel import AiterMxfp4Linear  # imported only when chosen

    return AiterMxfp4Linear()


def _build_triton(spec: Mxfp4LinearSpec, target: Target) -> Mxfp4LinearKernel:
    from atom_core.kernels.mxfp4_linear.triton_kernel import TritonMxfp4Linear  # needs triton, which a CPU may lack

    return TritonMxfp4Linear(spec.rounded_inputs, nvidia=target.kind == "cuda", overlap=overlaps(target))


MXFP4_LINEAR: Op[Mxfp4LinearSpec, Mxfp4LinearKernel] = Op(
    "mxfp4_linear",
    (
        Implementation("aiter", _aiter_supports, _build_aiter),
        Implementation("triton", lambda spec, target: why_no_triton(target), _build_triton),
        Implementation("reference", always, lambda spec, target: ReferenceMxfp4Linear(spec.rounded_inputs)),
    ),
)
