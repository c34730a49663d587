"""An RMS norm, the product after it, and optionally a gated activation, in as few launches as pay off.

    y = act(rms_norm(x) W^T + b)

as :mod:`atom_core.kernels.rms_norm`, one of :mod:`atom_core.kernels.linear`, :mod:`atom_core.kernels.fp8_linear`,
:mod:`atom_core.kernels.fp8_block_linear` and :mod:`atom_core.kernels.mxfp4_linear`, and
:mod:`atom_core.kernels.gated_activation` define them. ``x``: ``[T, K]``, not modified; ``y``: ``[T, N]``, with an
activation ``[T, N / 2]``. This op is for few rows; more rows run by the separate ops.
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

    ``separate``: the implementation chosen for each separate op; only the same implementation is fused.
    """

    in_features: int
    out_features: int
    activation: Activation | None
    separate: tuple[tuple[str, str], ...]


class Operands(NamedTuple):
    """The weight side of a layer's product."""

    weight: torch.Tensor
    """``[N, K]``, in FP8 in the device's variant; in MXFP4 uint8 ``[N, K / 2]``."""
    bias: torch.Tensor | None
    scale: torch.Tensor | None = None
    """FP8: float32 ``[N]`` of rows, or ``[ceil(N / 128), ceil(K / 128)]`` of blocks; MXFP4: uint8 ``[N, K / 32]``."""
    input_scale: torch.Tensor | None = None
    """FP8: float32 ``[1]`` where it is static."""
    rounded_inputs: bool = False
    """MXFP4: whether the input is rounded to it."""
    float32_result: bool = False
    """16 bits: whether the result is in float32."""


class NormedLinearKernel(Protocol):
    """Computes ``y`` from ``x``, the norm's weight and eps, and the layer."""

    max_rows: int
    """The largest number of rows, at least 1, for which it may be called."""

    def __call__(self, x: torch.Tensor, norm: torch.Tensor, eps: float, layer: Operands) -> torch.Tensor: ...


def _triton_supports(spec: NormedLinearSpec, target: Target) -> str | None:
    return why_not_fused(spec.separate)


def _build_triton(spec: NormedLinearSpec, target: Target) -> NormedLinearKernel | None:
    from atom_core.kernels.normed_linear.triton_kernel import TritonNormedLinear  # needs triton, which a CPU may lack

    quantized = LINEAR.name not in dict(spec.separate)
    return TritonNormedLinear(spec.activation, target.kind == "cuda", overlaps(target), quantized)


#: "separate" is not a kernel: the layers run the separate ops.
NORMED_LINEAR: Op[NormedLinearSpec, NormedLinearKernel | None] = Op(
    "normed_linear",
    (
        Implementation("triton", _triton_supports, _build_triton),
        Implementation("separate", always, lambda spec, target: None),
    ),
)
