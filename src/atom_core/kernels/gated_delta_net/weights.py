"""The weights of a Gated DeltaNet layer between its projections."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class GatedDeltaNetWeights:
    """This rank's; they are the model's own parameters, not copies: loading writes into them."""

    conv: torch.Tensor
    """``[C, W]``; the last tap is the token's own."""
    a_log: torch.Tensor
    """float32 ``[Hv]``."""
    dt_bias: torch.Tensor
    """float32 ``[Hv]``."""
    norm: torch.Tensor
    """``[V]``, of the gated norm of each value head."""
    eps: float
