"""The output gate in plain torch: the definition."""

from __future__ import annotations

import torch


def multiply_by_gate(out: torch.Tensor, gate: torch.Tensor) -> None:
    """See :mod:`atom_core.kernels.output_gate`."""
    out.copy_(out.float() * gate.float().sigmoid().view(out.shape))
