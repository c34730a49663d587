"""RMS norm in plain torch: the definition."""

from __future__ import annotations

import torch


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """See :mod:`atom_core.kernels.rms_norm`; inputs are not changed."""
    if residual is not None:
        x = residual = x + residual
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale * weight.float()).to(x.dtype), residual
