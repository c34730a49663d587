"""The experts of a mixture in FP8: :mod:`atom_core.kernels.experts` with products as in

- :mod:`atom_core.kernels.fp8_linear`, with a scale for each token, or
- :mod:`atom_core.kernels.fp8_block_linear`.

Gate/up weights ``[E, 2I, H]``, gate rows first, and down weights ``[E, H, I]`` are float8_e4m3fn. Scales are float32:
``[E, 2I]`` and ``[E, H]``, or with blocks ``[E, 2I / 128, ceil(H / 128)]`` and ``[E, ceil(H / 128), I / 128]``, where I
is a multiple of 128. The gate/up result is rounded to the model's dtype before it is quantised. A kernel may leave the
input of a single token unquantised. There are no biases.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from atom_core.kernels.aiter_library import why_no_aiter
from atom_core.kernels.fp8_experts.reference import ReferenceFp8Experts
from atom_core.kernels.fp8_linear.scaled_mm import why_no_fp8
from atom_core.kernels.select import Implementation, Op, Target
from atom_core.kernels.triton_support import overlaps, why_no_triton
from atom_core.types import Activation


@dataclass(frozen=True)
class Fp8ExpertsSpec:
    """The local experts of one layer: ``count`` from ``first`` on."""

    first: int
    count: int
    hidden_size: int
    intermediate_size: int
    top_k: int
    activation: Activation
    block: bool
    """Whether scales belong to blocks; else to rows."""
    dtype: torch.dtype
    total: int | None = None
    """Experts of all ranks; None: all experts are local."""
    shared: int = 0
    """How many of the local experts, the last ones, are shared: every token is routed to them."""


class Fp8ExpertWeights(NamedTuple):
    """The weights of all local experts; see the module."""

    gate_up: torch.Tensor
    gate_up_scale: torch.Tensor
    down: torch.Tensor
    down_scale: torch.Tensor


class Fp8ExpertsKernel(Protocol):
    """The experts of one layer."""

    def adopt(self, layer: Fp8ExpertWeights) -> None:
        """Take over loaded weights; a kernel may change bits without effect or reorder elements, in place."""

    def __call__(
        self, x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor, layer: Fp8ExpertWeights
    ) -> torch.Tensor:
        """``x [T, H]``, ``weights`` float32 and ``experts`` int32, both ``[T, k]``, to ``[T, H]``."""


def _aiter_supports(spec: Fp8ExpertsSpec, target: Target) -> str | None:
    if reason := why_no_aiter(target):
        return reason
    if spec.dtype != torch.bfloat16:
        return f"aiter's FP8 experts are used in models of bfloat16, not of {spec.dtype}."
    if spec.activation != "silu":
        return f"aiter's FP8 experts are used with silu, not with {spec.activation}."
    # Few tokens go through two tiled products, some of which have tiles of depth 256.
    wide = 256 if spec.block else 128
    narrow = 128 if spec.block or target.arch == "gfx942" else 256
    if spec.hidden_size % wide or spec.intermediate_size % narrow:
        scales = "blocks" if spec.block else "rows"
        return (
            f"aiter's experts in FP8 with scales of {scales} are, on {target.arch}, for hidden sizes that are "
            f"multiples of {wide} and intermediate sizes that are multiples of {narrow}, "
            f"not for {spec.hidden_size} and {spec.intermediate_size}."
        )
    return None


def _build_aiter(spec: Fp8ExpertsSpec, target: Target) -> Fp8ExpertsKernel:
    from atom_core.kernels.fp8_experts.aiter_kernel import AiterFp8Experts  # imported only when chosen

    return AiterFp8Experts(spec, target)


def _triton_supports(spec: Fp8ExpertsSpec, target: Target) -> str | None:
    return why_no_triton(target) or why_no_fp8(target)


def _build_triton(spec: Fp8ExpertsSpec, target: Target) -> Fp8ExpertsKernel:
    from atom_core.kernels.fp8_experts.triton_kernel import TritonFp8Experts  # needs triton, which a CPU may lack

    return TritonFp8Experts(spec, target, overlaps(target))


def _reference_supports(spec: Fp8ExpertsSpec, target: Target) -> str | None:
    if target.kind == "cpu":
        return None
    return "It asks which experts were chosen, which a graph on a GPU cannot wait for."


FP8_EXPERTS: Op[Fp8ExpertsSpec, Fp8ExpertsKernel] = Op(
    "fp8_experts",
    (
        Implementation("aiter", _aiter_supports, _build_aiter),
        Implementation("triton", _triton_supports, _build_triton),
        Implementation("reference", _reference_supports, lambda spec, target: ReferenceFp8Experts(spec)),
    ),
)
