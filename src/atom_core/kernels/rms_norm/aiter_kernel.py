"""RMS norm by aiter, with the residual's addition."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from atom_core.kernels.aiter_library import aiter_function, require
from atom_core.kernels.custom_op import custom_op

if TYPE_CHECKING:
    from atom_core.kernels.rms_norm import RmsNormKernel


def build() -> RmsNormKernel:
    """The kernel, after a check that aiter has both functions."""
    require("aiter.rms_norm", "aiter.rmsnorm2d_fwd_with_add")
    return rms_norm


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """See :mod:`atom_core.kernels.rms_norm`; inputs are not changed."""
    return (_norm(x, weight, eps), None) if residual is None else _add_and_norm(x, weight, eps, residual)


@custom_op("aiter_rms_norm", lambda x, weight, eps: torch.empty_like(x))
def _norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    if not len(x):
        return torch.empty_like(x)
    normed: torch.Tensor = aiter_function("aiter.rms_norm")(x, weight, eps)
    return normed


@custom_op("aiter_add_and_rms_norm", lambda x, weight, eps, residual: (torch.empty_like(x), torch.empty_like(residual)))
def _add_and_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    out, summed = torch.empty_like(x), torch.empty_like(residual)
    if len(x):
        # By name: the seventh parameter differs between versions.
        aiter_function("aiter.rmsnorm2d_fwd_with_add")(
            out=out, input=x, residual_in=residual, residual_out=summed, weight=weight, epsilon=eps
        )
    return out, summed
