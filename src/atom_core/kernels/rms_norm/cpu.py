"""RMS norm in the torch ops that are fastest on a CPU.

``vector_norm`` computes the sum of squares, as it is vectorised and a mean of squares is not.
"""

from __future__ import annotations

import torch


def inverse_rms(wide: torch.Tensor, eps: float) -> torch.Tensor:
    """``1 / sqrt(mean(x^2) + eps)`` over the last dimension of float32 ``wide [..., N]``: ``[..., 1]``."""
    length: torch.Tensor = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    return length.square_().mul_(1 / wide.shape[-1]).add_(eps).rsqrt_()


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """See :mod:`atom_core.kernels.rms_norm`; the residual is added in place."""
    if residual is not None:
        x = residual.add_(x)
    wide = x.to(torch.float32, copy=True)
    return wide.mul_(inverse_rms(wide, eps)).mul_(weight.float()).to(x.dtype), residual
