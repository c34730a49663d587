"""The experts of a mixture: each token through those that it was sent to, and the weighted sum of their answers.

    y[t] = sum over j of weights[t, j] * (down[e] (act(gate[e] x[t]) * (up[e] x[t])) + c[e]),  e = experts[t, j]

``x``: ``[T, H]``; ``weights``: float32 ``[T, k]``, ``experts``: int32 ``[T, k]``, no expert twice for a token; the
weights of gate and up ``[E, 2I, H]``, one behind the other, of down ``[E, H, I]``, their biases ``[E, 2I]`` and
``[E, H]`` or None; ``y``: ``[T, H]``. A rank may hold some of the experts: those that it does not hold add nothing.
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
    """The experts of one layer that this rank holds: ``count`` from ``first`` on, ``intermediate_size`` wide."""

    first: int
    count: int
    hidden_size: int
    intermediate_size: int
    top_k: int
    activation: Activation
    bias: bool
    dtype: torch.dtype
    total: int | None = None
    """Experts of all ranks; None: this one holds them all."""
    shared: int = 0
    """How many of these, the last, every token goes to."""


class ExpertWeights(NamedTuple):
    """Of all experts that this rank holds."""

    gate_up: torch.Tensor
    down: torch.Tensor
    gate_up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None
    tiled: bool = False
    """Whether a kernel has moved the numbers of both as :mod:`.tiled` has it."""


class ExpertsKernel(Protocol):
    """The call: ``x``, ``weights`` and ``experts`` as the module's text has them, and the layer's, to ``y``."""

    def adopt(self, layer: ExpertWeights) -> bool:
        """Take over loaded weights, whose numbers may be moved in place.

        True: the kernel holds all matrices that it needs, and the layer's are to be freed.
        """

    def __call__(
        self, x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor, layer: ExpertWeights
    ) -> torch.Tensor: ...


Weights_contra = TypeVar("Weights_contra", contravariant=True)


@runtime_checkable
class PackingExpertsKernel(Protocol):
    """Experts whose :meth:`ExpertsKernel.adopt` may be True."""

    def unpacked(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The adopted weights of gates and ups, and of down, in memory of their own."""


@runtime_checkable
class AddingExpertsKernel(Protocol[Weights_contra]):
    """A kernel that can add to a residual on its way, and norm few tokens in front, however it keeps its weights."""

    max_normed: int
    """Tokens up to which :meth:`add_behind_norm` is to be called, from 1 on."""

    def add(
        self,
        x: torch.Tensor,
        weights: torch.Tensor,
        experts: torch.Tensor,
        layer: Weights_contra,
        residual: torch.Tensor,
    ) -> torch.Tensor:
        """``residual += y``, rounded once; ``residual`` is contiguous, and is the result."""

    def add_behind_norm(
        self,
        stream: torch.Tensor,
        norm: torch.Tensor,
        eps: float,
        weights: torch.Tensor,
        experts: torch.Tensor,
        layer: Weights_contra,
    ) -> torch.Tensor:
        """``stream += y`` of ``x = rms_norm(stream)``; see :mod:`atom_core.kernels.rms_norm`.

        In 16 bits ``x`` is not rounded; before it is quantised, and beside MXFP4, it is.
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
            "aiter's experts are for hidden sizes that are multiples of 128, with middles that are multiples of 128, "
            f"or of 64 up to 192; not for {spec.hidden_size} with {size}."
        )
    return None


def _build_aiter(spec: ExpertsSpec, target: Target) -> ExpertsKernel:
    from atom_core.kernels.experts.aiter_kernel import AiterExperts  # looked for when it is chosen

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
