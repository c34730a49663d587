"""A norm and the router behind it, of few tokens in one launch.

    y = rms_norm(x);  logits = y W^T + b

as :mod:`atom_core.kernels.rms_norm` and :mod:`atom_core.kernels.linear` define them, but that what the router
multiplies need not be rounded to the dtype of ``x``. ``x``: ``[T, H]``, left as it is; ``y``: ``[T, H]``, for the
experts; ``logits``: ``[T, E]``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from atom_core.kernels.normed_linear import Operands
from atom_core.kernels.select import Implementation, Op, Target, always
from atom_core.kernels.triton_support import overlaps, why_not_fused


@dataclass(frozen=True)
class NormedRouterSpec:
    """One mixture's.

    ``separate`` names the implementation that was chosen for each op by itself: what is fused is what was chosen.
    """

    separate: tuple[tuple[str, str], ...]


class NormedRouterKernel(Protocol):
    """The call: ``(x, norm weight, eps, the router's)`` to ``y`` and the logits."""

    tokens: range
    """How many tokens it is to be called for."""

    def __call__(
        self, x: torch.Tensor, norm: torch.Tensor, eps: float, router: Operands
    ) -> tuple[torch.Tensor, torch.Tensor]: ...


def _triton_supports(spec: NormedRouterSpec, target: Target) -> str | None:
    return why_not_fused(spec.separate)


def _build_triton(spec: NormedRouterSpec, target: Target) -> NormedRouterKernel | None:
    from atom_core.kernels.normed_router.triton_kernel import TritonNormedRouter  # needs triton, which a CPU may lack

    return TritonNormedRouter(overlaps(target))


#: "separate" is no kernel: the layers run each op by itself.
NORMED_ROUTER: Op[NormedRouterSpec, NormedRouterKernel | None] = Op(
    "normed_router",
    (
        Implementation("triton", _triton_supports, _build_triton),
        Implementation("separate", always, lambda spec, target: None),
    ),
)
