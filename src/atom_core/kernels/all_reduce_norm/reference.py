"""The all-reduce and the norm in plain torch: the definition, over the partial sums of all ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from atom_core.kernels.rms_norm.reference import rms_norm


def all_reduce_norm(
    partial_sums: Sequence[torch.Tensor], residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """See :mod:`atom_core.kernels.all_reduce_norm`; ``partial_sums`` are ``x`` of each rank. Inputs are not changed."""
    summed = residual.float() + torch.stack([partial.float() for partial in partial_sums]).sum(0)
    summed = summed.to(residual.dtype)
    return rms_norm(summed, weight, eps, None)[0], summed
