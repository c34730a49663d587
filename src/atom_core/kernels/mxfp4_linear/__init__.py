"""Matrix product with a weight in MXFP4: ``y = x W^T + b``.

A number has four bits (e2m1: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives); 32 of a row share a scale, a power of two
in one byte (e8m0). See the OCP Microscaling Formats specification, version 1.0. ``blocks``: uint8 ``[N, K / 2]``, the
first of two numbers in a byte's lower half; ``scales``: uint8 ``[N, K / 32]``, 127 for 1:

    W[n, k] = e2m1(blocks[n, k / 2]) * 2 ** (scales[n, k / 32] - 127)

``x``: ``[T, K]`` and ``b``: ``[N]`` or None, of the model's dtype; ``y``: ``[T, N]``. Where inputs are rounded, ``x``
becomes MXFP4 first, and numbers of the model's dtype again: each 32 of a token have the scale

    2 ** (floor(log2(a)) - 2),  a = the largest magnitude of them, rounded to one bit after the first

and each number is the nearest that e2m1 has, of two as near the even one, and at most 6 in magnitude: what AMD Quark
calls "even". 32 numbers of which one is not finite are NaN. Products are those of the model's dtype. Weights stay
packed: kernels turn them into the model's dtype in registers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from atom_core.kernels.mxfp4_linear.reference import ReferenceMxfp4Linear
from atom_core.kernels.select import Implementation, Op, Target, always
from atom_core.kernels.triton_support import overlaps, why_no_triton


@dataclass(frozen=True)
class Mxfp4LinearSpec:
    """One product: ``in_features`` is K, ``out_features`` N, as this rank holds them; ``dtype`` is the model's."""

    in_features: int
    out_features: int
    bias: bool
    rounded_inputs: bool
    dtype: torch.dtype


class Mxfp4LinearKernel(Protocol):
    """A product bound to one layer."""

    def __call__(
        self, x: torch.Tensor, blocks: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """``x [T, K]`` to ``[T, N]``."""


@runtime_checkable
class FewRowsMxfp4Kernel(Protocol):
    """A product that others may be fused with where there are few rows."""

    max_rows: int

    def add(
        self,
        x: torch.Tensor,
        blocks: torch.Tensor,
        scales: torch.Tensor,
        bias: torch.Tensor | None,
        residual: torch.Tensor,
    ) -> torch.Tensor:
        """``residual += y``, rounded once, of at most ``max_rows`` rows; ``residual`` is contiguous."""


def _build_triton(spec: Mxfp4LinearSpec, target: Target) -> Mxfp4LinearKernel:
    from atom_core.kernels.mxfp4_linear.triton_kernel import TritonMxfp4Linear  # needs triton, which a CPU may lack

    return TritonMxfp4Linear(spec.rounded_inputs, nvidia=target.kind == "cuda", overlap=overlaps(target))


MXFP4_LINEAR: Op[Mxfp4LinearSpec, Mxfp4LinearKernel] = Op(
    "mxfp4_linear",
    (
        Implementation("triton", lambda spec, target: why_no_triton(target), _build_triton),
        Implementation("reference", always, lambda spec, target: ReferenceMxfp4Linear(spec.rounded_inputs)),
    ),
)
