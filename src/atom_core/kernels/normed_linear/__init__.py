"""A norm, the product behind it, and the gated activation behind that where there is one, in as few launches as pay.

    y = act(rms_norm(x) (s W)^T + b)

as :mod:`atom_core.kernels.rms_norm`, :mod:`atom_core.kernels.linear` and :mod:`atom_core.kernels.gated_activation`
define them. ``x``: ``[T, K]``, left as it is; ``W``: ``[N, K]``, in FP8 with ``s [N]``, a scale a row; ``y``:
``[T, N]``, with an activation ``[T, N / 2]``. It is for few rows: more are run by the ops that it is made of.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from atom_core.config import Activation
from atom_core.kernels.select import Implementation, Op, Target, always
from atom_core.kernels.triton_support import overlaps


@dataclass(frozen=True)
class NormedLinearSpec:
    """One norm and product.

    ``separate`` names the implementation that was chosen for each op by itself: what is fused is what was chosen.
    """

    in_features: int
    out_features: int
    activation: Activation | None
    separate: tuple[tuple[str, str], ...]


class NormedLinearKernel(Protocol):
    """The call: ``(x, norm weight, eps, W, s, b)`` to ``y``."""

    max_rows: int
    """Rows of ``x`` up to which it is to be called, from 1 on."""

    def __call__(
        self,
        x: torch.Tensor,
        norm: torch.Tensor,
        eps: float,
        weight: torch.Tensor,
        scales: torch.Tensor | None,
        bias: torch.Tensor | None,
    ) -> torch.Tensor: ...


def _triton_supports(spec: NormedLinearSpec, target: Target) -> str | None:
    for op, chosen in spec.separate:
        if chosen != "triton":
            return f"It fuses Triton kernels, and {op} is {chosen} here."
    return None


def _build_triton(spec: NormedLinearSpec, target: Target) -> NormedLinearKernel | None:
    from atom_core.kernels.normed_linear.triton_kernel import TritonNormedLinear  # needs triton, which a CPU may lack

    return TritonNormedLinear(spec.activation, nvidia=target.kind == "cuda", overlap=overlaps(target))


#: "separate" is no kernel: the layers run each op by itself.
NORMED_LINEAR: Op[NormedLinearSpec, NormedLinearKernel | None] = Op(
    "normed_linear",
    (
        Implementation("triton", _triton_supports, _build_triton),
        Implementation("separate", always, lambda spec, target: None),
    ),
)
