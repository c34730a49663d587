"""Mixture-of-experts layer: each token runs through its experts, and their weighted outputs are summed.

    y[t] = sum over j of weights[t, j] * (down[e] (act(gate[e] x[t]) * (up[e] x[t])) + c[e]),  e = experts[t, j]

``x``: ``[T, H]``; ``weights``: float32 ``[T, k]``; ``experts``: int32 ``[T, k]``, distinct for each token; gate and up
weights: ``[E, 2I, H]``, gate rows first; down weights: ``[E, H, I]``; biases: ``[E, 2I]`` and ``[E, H]`` or None;
``y``: ``[T, H]``. A rank may have only some of the experts (its local experts); the others add nothing to ``y``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeVar, runtime_checkable

import torch

from atom_core.kernels.aiter_library import why_no_aiter
from atom_core.kernels.experts.mkldnn import MkldnnExperts
from atom_core.kernels.experts.reference import ReferenceExperts
from atom_core.kernels.linear.mkldnn import why_no_packing
from atom_core.kernels.linear.widened import why_not_widened, widened_linear
from atom_core.kernels.select import Implementation, Op, Target
from atom_core.kernels.triton_support import overlaps, why_no_triton
from atom_core.types import Activation


@dataclass(frozen=True)
class ExpertsSpec:
    """The local experts of one layer: ``count`` from ``first`` on."""

    first: int
    count: int
    hidden_size: int
    intermediate_size: int
    top_k: int
    activation: Activation
    bias: bool
    dtype: torch.dtype
    total: int | None = None
    """Experts of all ranks; None: all experts are local."""
    shared: int = 0
    """How many of the local experts, the last ones, are shared: every token is routed to them."""


class ExpertWeights(NamedTuple):
    """The weights of all local experts."""

    gate_up: torch.Tensor
    down: torch.Tensor
    gate_up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None
    blocked: bool = False
    """Whether the kernel stores both weights in the blocked layout of :mod:`.blocked_layout`."""


class ExpertsKernel(Protocol):
    """Runs the experts: ``x``, ``weights``, ``experts`` and the layer's weights to ``y``."""

    def adopt(self, layer: ExpertWeights) -> bool:
        """Take over loaded weights; the kernel may reorder their elements in place.

        True: the kernel has its own copy of both matrices, and the caller frees the layer's.
        """

    def __call__(
        self, x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor, layer: ExpertWeights
    ) -> torch.Tensor: ...


Weights_contra = TypeVar("Weights_contra", contravariant=True)


@runtime_checkable
class PackingExpertsKernel(Protocol):
    """A kernel whose :meth:`ExpertsKernel.adopt` may return True."""

    def unpacked(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The adopted gate/up and down weights, newly allocated."""


@runtime_checkable
class AddingExpertsKernel(Protocol[Weights_contra]):
    """A kernel that can add its result to a residual, and can apply an RMS norm first for few tokens."""

    max_normed: int
    """The largest number of tokens, at least 1, for which :meth:`add_after_norm` may be called."""

    def add(
        self,
        x: torch.Tensor,
        weights: torch.Tensor,
        experts: torch.Tensor,
        layer: Weights_contra,
        residual: torch.Tensor,
    ) -> torch.Tensor:
        """``residual += y``, rounded once; ``residual`` is contiguous, and is returned."""

    def add_after_norm(
        self,
        stream: torch.Tensor,
        norm: torch.Tensor,
        eps: float,
        weights: torch.Tensor,
        experts: torch.Tensor,
        layer: Weights_contra,
    ) -> torch.Tensor:
        """``stream += y`` with ``x = rms_norm(stream)``; see :mod:`atom_core.kernels.rms_norm`.

        16-bit kernels do not round ``x``; FP8 and MXFP4 kernels round it before they quantise or multiply it.
        """


def _aiter_supports(spec: ExpertsSpec, target: Target) -> str | None:
    if reason := why_no_aiter(target):
        return reason
    if spec.dtype not in (torch.bfloat16, torch.float16):
        return f"aiter's experts are for numbers of two bytes, not for {spec.dtype}."
    if spec.bias:
        return "aiter's experts add biases in MXFP4 alone."
    if spec.activation != "silu":
        return f"aiter's experts are used with silu, not with {spec.activation}."
    size = spec.intermediate_size
    if spec.hidden_size % 128 or size % (64 if size <= 192 else 128):
        return (
            "aiter's experts are for hidden sizes that are multiples of 128, with intermediate sizes that are "
            f"multiples of 128, or of 64 up to 192; not for {spec.hidden_size} with {size}."
        )
    return None


def _build_aiter(spec: ExpertsSpec, target: Target) -> ExpertsKernel:
    from atom_core.kernels.experts.aiter_kernel import AiterExperts  # imported only when chosen

    return AiterExperts(spec)


def _triton_supports(spec: ExpertsSpec, target: Target) -> str | None:
    return why_no_triton(target)


def _build_triton(spec: ExpertsSpec, target: Target) -> ExpertsKernel:
    from atom_core.kernels.experts.triton_kernel import TritonExperts  # needs triton, which a CPU may lack

    return TritonExperts(spec, overlaps(target))


def _reference_supports(spec: ExpertsSpec, target: Target) -> str | None:
    if target.kind == "cpu":
        return None
    return "It asks which experts were chosen, which a graph on a GPU cannot wait for."


EXPERTS: Op[ExpertsSpec, ExpertsKernel] = Op(
    "experts",
    (
        Implementation("aiter", _aiter_supports, _build_aiter),
        Implementation("triton", _triton_supports, _build_triton),
        Implementation(
            "torch", lambda spec, target: why_no_packing(spec.dtype, target), lambda spec, target: MkldnnExperts(spec)
        ),
        Implementation(
            "widened",
            lambda spec, target: why_not_widened(spec.dtype, target),
            lambda spec, target: ReferenceExperts(spec, widened_linear),
        ),
        Implementation("reference", _reference_supports, lambda spec, target: ReferenceExperts(spec)),
    ),
)
