"""The gated feed-forward network: ``down(act(gate(x)) * up(x))``."""

from __future__ import annotations

import torch
from torch import nn

from atom_core.config import ModelConfig
from atom_core.kernels.gated_activation import GATED_ACTIVATION, GatedActivationSpec
from atom_core.layers.linear import Column, MergedColumnLinear, RowLinear
from atom_core.layers.parameters import share
from atom_core.runtime import Runtime


class GatedMLP(nn.Module):
    """See the module's text; gate and up are one weight."""

    def __init__(self, config: ModelConfig, runtime: Runtime) -> None:
        super().__init__()
        group = runtime.tensor_parallel
        size = config.intermediate_size
        mine = share(size, group.rank, group.world_size, "intermediate_size")
        columns = (Column("gate_proj", size, mine), Column("up_proj", size, mine))
        self.gate_up_proj = MergedColumnLinear(config.hidden_size, columns, config.mlp_bias, runtime)
        self.down_proj = RowLinear(size, config.hidden_size, config.mlp_bias, runtime, "intermediate_size")
        self.activate = runtime.kernels.select(
            GATED_ACTIVATION, GatedActivationSpec(config.activation, len(mine), runtime.dtype)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x [T, hidden]`` to ``[T, hidden]``."""
        projected: torch.Tensor = self.down_proj(self.activate(self.gate_up_proj(x)))
        return projected
