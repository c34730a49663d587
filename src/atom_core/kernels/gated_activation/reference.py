"""Gated activation in plain torch: the definition."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from atom_core.types import SWIGLU_LIMIT, SWIGLU_STEEPNESS, Activation


def gated_activation(x: torch.Tensor, activation: Activation) -> torch.Tensor:
    """See :mod:`atom_core.kernels.gated_activation`."""
    gate, up = x.chunk(2, dim=-1)
    if activation == "clamped_swiglu":
        gate, up = gate.clamp(max=SWIGLU_LIMIT), up.clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT)
        return torch.sigmoid(SWIGLU_STEEPNESS * gate).mul_(gate).mul_(up.add_(1))
    if activation == "silu":
        return F.silu(gate).mul_(up)
    return F.gelu(gate, approximate="tanh" if activation == "gelu_tanh" else "none").mul_(up)
