"""An RMS norm and a product of few outputs after it, for few tokens in one launch.

    y = rms_norm(x);  logits = y W^T + b

as :mod:`atom_core.kernels.rms_norm` and :mod:`atom_core.kernels.linear` define them, except that the product's input
may be unrounded. The product is a router, or the gates of linear attention (b and a). ``x``: ``[T, H]``, not modified;
``y``: ``[T, H]``, for the experts or the larger product; ``logits``: ``[T, E]``. For a larger product in FP8 the same
launch quantises ``y``, as :mod:`atom_core.kernels.fp8_rms_norm` does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from atom_core.kernels.fp8_inputs import InputForm, QuantizedInput
from atom_core.kernels.linear import LINEAR
from atom_core.kernels.normed_linear import Operands
from atom_core.kernels.select import Implementation, Op, Target, always
from atom_core.kernels.triton_support import overlaps, why_not_fused


@dataclass(frozen=True)
class NormedRouterSpec:
    """One norm and product, whose weight is not quantised.

    ``separate``: the implementation chosen for each separate op; only the same implementation is fused.
    """

    separate: tuple[tuple[str, str], ...]


class NormedRouterKernel(Protocol):
    """Computes ``y`` and the logits from ``x``, the norm's weight and eps, and the product's operands."""

    tokens: range
    """The numbers of tokens for which it may be called."""

    def __call__(
        self, x: torch.Tensor, norm: torch.Tensor, eps: float, router: Operands
    ) -> tuple[torch.Tensor, torch.Tensor]: ...

    def quantized(
        self, x: torch.Tensor, norm: torch.Tensor, eps: float, router: Operands, form: InputForm
    ) -> tuple[QuantizedInput, torch.Tensor]:
        """``y`` in ``form``, whose groups have a power of two of elements, and the logits."""


def _triton_supports(spec: NormedRouterSpec, target: Target) -> str | None:
    if LINEAR.name not in dict(spec.separate):
        return "It multiplies by weights in the model's dtype or float32, and these are quantised."
    return why_not_fused(spec.separate)


def _build_triton(spec: NormedRouterSpec, target: Target) -> NormedRouterKernel | None:
    from atom_core.kernels.normed_router.triton_kernel import TritonNormedRouter  # needs triton, which a CPU may lack

    return TritonNormedRouter(overlaps(target))


#: "separate" is not a kernel: the layers run the separate ops.
NORMED_ROUTER: Op[NormedRouterSpec, NormedRouterKernel | None] = Op(
    "normed_router",
    (
        Implementation("triton", _triton_supports, _build_triton),
        Implementation("separate", always, lambda spec, target: None),
    ),
)
