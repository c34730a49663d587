"""Matrix product with a weight: ``y = x W^T + b``.

``x``: ``[T, K]``; ``W``: ``[N, K]``; ``b``: ``[N]`` or None; ``y``: ``[T, N]``, all of one dtype, or ``y`` in float32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from atom_core.kernels.aiter_library import why_no_aiter
from atom_core.kernels.linear.mkldnn import MkldnnLinear, why_no_packing
from atom_core.kernels.linear.reference import TorchLinear
from atom_core.kernels.linear.widened import WidenedLinear, why_not_widened
from atom_core.kernels.select import Implementation, Op, Target, always
from atom_core.kernels.triton_support import overlaps, remark_on_few_rows, why_no_triton


@dataclass(frozen=True)
class LinearSpec:
    """One product: ``in_features`` is K and ``out_features`` N, both of this rank."""

    in_features: int
    out_features: int
    bias: bool
    dtype: torch.dtype
    shares_weight: bool = False
    """Whether another layer reads the weight too (tied embeddings), so that it must not change."""
    few_rows: bool = False
    """Whether ``x`` has rows only for sampled tokens (a head), never for a whole prompt."""
    float32_result: bool = False
    """Whether the result is in float32."""


class LinearKernel(Protocol):
    """The product of one layer; it may store the weight in another form."""

    def adopt(self, weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
        """Take over loaded weights. True: the kernel has its own copy, and the caller frees the layer's weight."""

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor: ...


@runtime_checkable
class PackingLinearKernel(Protocol):
    """A product whose :meth:`LinearKernel.adopt` may return True."""

    def unpacked(self) -> torch.Tensor:
        """The adopted weight ``[N, K]``, newly allocated."""


@runtime_checkable
class AddingLinearKernel(Protocol):
    """A product that can add its result to a residual."""

    def add(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor
    ) -> torch.Tensor:
        """``residual += x W^T + b``, rounded once; ``residual`` is contiguous, and is returned."""


def _torch_supports(spec: LinearSpec, target: Target) -> str | None:
    if spec.shares_weight:
        return "Packing a weight that the embedding reads too would keep it in memory twice."
    if spec.float32_result:
        return "Products with packed weights have results in the model's dtype, not in float32."
    return why_no_packing(spec.dtype, target)


def _widened_supports(spec: LinearSpec, target: Target) -> str | None:
    if spec.float32_result:
        return "Widened products are rounded to the model's dtype."
    return why_not_widened(spec.dtype, target)


def _aiter_supports(spec: LinearSpec, target: Target) -> str | None:
    if reason := why_no_aiter(target):
        return reason
    if spec.dtype not in (torch.bfloat16, torch.float16):
        return f"aiter's tuned products are for numbers of two bytes, not for {spec.dtype}."
    if spec.float32_result and spec.bias:
        return "aiter's products with results in float32 are used without a bias."
    return None


def _build_aiter(spec: LinearSpec, target: Target) -> LinearKernel:
    from atom_core.kernels.linear.aiter_kernel import AiterFloat32Linear, AiterLinear  # imported only when chosen

    return AiterFloat32Linear() if spec.float32_result else AiterLinear()


def _triton_supports(spec: LinearSpec, target: Target) -> str | None:
    if reason := why_no_triton(target):
        return reason
    if spec.dtype not in (torch.bfloat16, torch.float16):
        return f"The Triton kernel is for numbers of two bytes, not for {spec.dtype}."
    return None


def _build_triton(spec: LinearSpec, target: Target) -> LinearKernel:
    from atom_core.kernels.linear.triton_kernel import TritonLinear  # needs triton, which a CPU may lack

    return TritonLinear(target.kind == "cuda", overlaps(target), spec.float32_result, spec)


LINEAR: Op[LinearSpec, LinearKernel] = Op(
    "linear",
    (
        Implementation("aiter", _aiter_supports, _build_aiter),
        Implementation("triton", _triton_supports, _build_triton, remark_on_few_rows),
        Implementation("torch", _torch_supports, lambda spec, target: MkldnnLinear()),
        Implementation("widened", _widened_supports, lambda spec, target: WidenedLinear()),
        Implementation("reference", always, lambda spec, target: TorchLinear(spec.float32_result)),
    ),
)
