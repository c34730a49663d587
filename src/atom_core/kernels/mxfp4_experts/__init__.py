"""The experts of a mixture in MXFP4: :mod:`atom_core.kernels.experts` with other weights.

Both products are those of :mod:`atom_core.kernels.mxfp4_linear`, whose inputs may be rounded to MXFP4.

Gate/up weights are ``[E, 2I, H]``, gate rows first, down weights ``[E, H, I]``. They stay packed: kernels convert them
to the model's dtype in registers, or multiply MXFP4 by MXFP4. An expert's scales ``[rows, groups]`` are stored
transposed (:func:`empty_scales`), because kernels read many rows of few groups at a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from atom_core.kernels.aiter_library import why_no_aiter
from atom_core.kernels.experts import ExpertsSpec
from atom_core.kernels.mxfp4_experts.reference import ReferenceMxfp4Experts
from atom_core.kernels.mxfp4_linear import why_no_fp4
from atom_core.kernels.select import Implementation, Op, Target
from atom_core.kernels.triton_support import overlaps, why_no_triton
from atom_core.quant.mxfp4 import GROUP


@dataclass(frozen=True)
class Mxfp4ExpertsSpec(ExpertsSpec):
    """The local experts of one layer."""

    rounded_inputs: bool = False
    """Whether the inputs of both products are rounded to MXFP4."""


class Mxfp4Weights(NamedTuple):
    """The weights of all local experts."""

    gate_up: torch.Tensor
    gate_up_scale: torch.Tensor
    down: torch.Tensor
    down_scale: torch.Tensor
    gate_up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None


def empty_scales(count: int, rows: int, columns: int, device: torch.device | None = None) -> torch.Tensor:
    """uint8 ``[count, rows, columns / 32]``, transposed in memory as kernels read them."""
    return torch.empty(count, columns // GROUP, rows, dtype=torch.uint8, device=device).transpose(1, 2)


class Mxfp4ExpertsKernel(Protocol):
    """The call is that of :class:`atom_core.kernels.experts.ExpertsKernel`."""

    def adopt(self, layer: Mxfp4Weights) -> None:
        """Take over loaded weights; a kernel may reorder the packed bytes in place."""

    def __call__(
        self, x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor, layer: Mxfp4Weights
    ) -> torch.Tensor: ...


def _aiter_supports(spec: Mxfp4ExpertsSpec, target: Target) -> str | None:
    if reason := why_no_aiter(target) or why_no_fp4(target):
        return reason
    if not spec.rounded_inputs:
        return (
            "aiter's experts in MXFP4 round activations to it, or from 256 tokens on to FP8, and this checkpoint's are "
            "not rounded."
        )
    if spec.dtype != torch.bfloat16:
        return f"aiter's experts in MXFP4 are used in models of bfloat16, not of {spec.dtype}."
    if spec.bias:
        return "aiter's experts in MXFP4 are used without biases, which not all of its kernels add."
    if spec.activation != "silu":
        return f"aiter's experts in MXFP4 are used with silu, not with {spec.activation}."
    if spec.total not in (None, spec.count):
        return (
            f"aiter's experts in MXFP4 are used where all experts are local, not {spec.count} of {spec.total}: "
            "its tuned kernels refuse a share."
        )
    if spec.hidden_size % 256 or spec.intermediate_size % 256:
        return (
            "aiter's experts in MXFP4 are used for hidden and intermediate sizes that are multiples of 256, "
            f"not for {spec.hidden_size} and {spec.intermediate_size}."
        )
    return None


def _build_aiter(spec: Mxfp4ExpertsSpec, target: Target) -> Mxfp4ExpertsKernel:
    from atom_core.kernels.mxfp4_experts.aiter_kernel import AiterMxfp4Experts  # imported only when chosen

    return AiterMxfp4Experts()


def _triton_supports(spec: Mxfp4ExpertsSpec, target: Target) -> str | None:
    return why_no_triton(target)


def _build_triton(spec: Mxfp4ExpertsSpec, target: Target) -> Mxfp4ExpertsKernel:
    from atom_core.kernels.mxfp4_experts.triton_kernel import TritonMxfp4Experts  # needs triton, which a CPU may lack

    return TritonMxfp4Experts(spec, overlaps(target))


def _reference_supports(spec: Mxfp4ExpertsSpec, target: Target) -> str | None:
    if target.kind == "cpu":
        return None
    return "It asks which experts were chosen, which a graph on a GPU cannot wait for."


MXFP4_EXPERTS: Op[Mxfp4ExpertsSpec, Mxfp4ExpertsKernel] = Op(
    "mxfp4_experts",
    (
        Implementation("aiter", _aiter_supports, _build_aiter),
        Implementation("triton", _triton_supports, _build_triton),
        Implementation("reference", _reference_supports, lambda spec, target: ReferenceMxfp4Experts(spec)),
    ),
)
