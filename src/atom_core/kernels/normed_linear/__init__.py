"""A norm, the product behind it, and the gated activation behind that where there is one, in as few launches as pay.

    y = act(rms_norm(x) W^T + b)

as :mod:`atom_core.kernels.rms_norm`, one of :mod:`atom_core.kernels.linear`, :mod:`atom_core.kernels.fp8_linear`,
:mod:`atom_core.kernels.fp8_block_linear` and :mod:`atom_core.kernels.mxfp4_linear`, and
:mod:`atom_core.kernels.gated_activation` define them. ``x``: ``[T, K]``, left as it is; ``y``: ``[T, N]``, with an
activation ``[T, N / 2]``. It is for few rows: more are run by the ops that it is made of.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from atom_core.kernels.linear import LINEAR
from atom_core.kernels.select import Implementation, Op, Target, always
from atom_core.kernels.triton_support import overlaps, why_not_fused
from atom_core.types import Activation


@dataclass(frozen=True)
class NormedLinearSpec:
    """One norm and product.

    ``separate`` names the implementation that was chosen for each op by itself: what is fused is what was chosen.
    """

    in_features: int
    out_features: int
    activation: Activation | None
    separate: tuple[tuple[str, str], ...]


class Operands(NamedTuple):
    """A layer's side of the product."""

    weight: torch.Tensor
    """``[N, K]``, in FP8 as the device multiplies it; in MXFP4 uint8 ``[N, K / 2]``."""
    bias: torch.Tensor | None
    scale: torch.Tensor | None = None
    """With FP8: float32 ``[N]``, of the weight's rows, or ``[ceil(N / 128), ceil(K / 128)]``, of its blocks.

    With MXFP4: uint8 ``[N, K / 32]``.
    """
    input_scale: torch.Tensor | None = None
    """With FP8: float32 ``[1]`` where it is static."""
    rounded_inputs: bool = False
    """With MXFP4: whether the input is rounded to it."""
    float32_result: bool = False
    """In 16 bits: the product is in float32, and stays so."""


class NormedLinearKernel(Protocol):
    """The call: ``(x, norm weight, eps, the layer's)`` to ``y``."""

    max_rows: int
    """Rows of ``x`` up to which it is to be called, from 1 on."""

    def __call__(self, x: torch.Tensor, norm: torch.Tensor, eps: float, layer: Operands) -> torch.Tensor: ...


def _triton_supports(spec: NormedLinearSpec, target: Target) -> str | None:
    return why_not_fused(spec.separate)


def _build_triton(spec: NormedLinearSpec, target: Target) -> NormedLinearKernel | None:
    from atom_core.kernels.normed_linear.triton_kernel import TritonNormedLinear  # needs triton, which a CPU may lack

    quantized = LINEAR.name not in dict(spec.separate)
    return TritonNormedLinear(spec.activation, target.kind == "cuda", overlaps(target), quantized)


#: "separate" is no kernel: the layers run each op by itself.
NORMED_LINEAR: Op[NormedLinearSpec, NormedLinearKernel | None] = Op(
    "normed_linear",
    (
        Implementation("triton", _triton_supports, _build_triton),
        Implementation("separate", always, lambda spec, target: None),
    ),
)
