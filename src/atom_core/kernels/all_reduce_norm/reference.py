"""The sum over ranks and the norm behind it in plain torch: the definition, of what all ranks have."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from atom_core.kernels.rms_norm.reference import rms_norm


def all_reduce_norm(
    parts: Sequence[torch.Tensor], residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """See :mod:`atom_core.kernels.all_reduce_norm`; ``parts`` are ``x`` of each rank. Inputs are left alone."""
    summed = residual.float() + torch.stack([part.float() for part in parts]).sum(0)
    summed = summed.to(residual.dtype)
    return rms_norm(summed, weight, eps, None)[0], summed
