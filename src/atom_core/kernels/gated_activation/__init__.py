"""The activation of a gated MLP: ``act(gate) * up`` over ``x = [gate | up]``.

``x``: ``[T, 2N]``; result ``[T, N]``. ``act`` is SiLU, GELU (erf) or GELU (tanh); see arXiv 2002.05202. The clamped
SwiGLU of GPT-OSS (arXiv 2508.10925) is:

    gate * sigmoid(1.702 * gate) * (up + 1),  gate at most 7, up from -7 to 7
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from atom_core.kernels.aiter_library import why_no_aiter
from atom_core.kernels.gated_activation.reference import gated_activation
from atom_core.kernels.select import Implementation, Op, Target, always
from atom_core.kernels.triton_support import overlaps, why_no_triton
from atom_core.types import Activation


@dataclass(frozen=True)
class GatedActivationSpec:
    """One gated activation: the function, the width of its result, the dtype."""

    activation: Activation
    size: int
    dtype: torch.dtype


GatedActivationKernel = Callable[[torch.Tensor], torch.Tensor]


def _aiter_supports(spec: GatedActivationSpec, target: Target) -> str | None:
    if reason := why_no_aiter(target):
        return reason
    if spec.dtype not in (torch.bfloat16, torch.float16):
        return f"aiter's activations are for bfloat16 and float16, not for {spec.dtype}."
    return f"aiter's activations have widths in multiples of 8, not {spec.size}." if spec.size % 8 else None


def _build_aiter(spec: GatedActivationSpec, target: Target) -> GatedActivationKernel:
    from atom_core.kernels.gated_activation.aiter_kernel import build  # imports aiter when it is built

    return build(spec.activation)


def _triton_supports(spec: GatedActivationSpec, target: Target) -> str | None:
    return why_no_triton(target)


def _build_triton(spec: GatedActivationSpec, target: Target) -> GatedActivationKernel:
    from atom_core.kernels.gated_activation.triton_kernel import gated_activation as launch  # needs triton

    return partial(launch, activation=spec.activation, overlap=overlaps(target))


GATED_ACTIVATION: Op[GatedActivationSpec, GatedActivationKernel] = Op(
    "gated_activation",
    (
        Implementation("aiter", _aiter_supports, _build_aiter),
        Implementation("triton", _triton_supports, _build_triton),
        Implementation("reference", always, lambda spec, target: partial(gated_activation, activation=spec.activation)),
    ),
)
