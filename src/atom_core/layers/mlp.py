"""The gated feed-forward network: ``down(act(gate(x)) * up(x))``."""

from __future__ import annotations

import torch
from torch import nn

from atom_core.config import ModelConfig
from atom_core.layers.gated_activation import GatedActivation
from atom_core.layers.linear import Column, MergedColumnLinear, RowLinear
from atom_core.layers.parameters import share
from atom_core.runtime import Runtime


class GatedMLP(nn.Module):
    """See the module; gate and up are one weight."""

    def __init__(self, config: ModelConfig, runtime: Runtime, name: str) -> None:
        super().__init__()
        group = runtime.tensor_parallel
        size = config.intermediate_size
        mine = share(size, group.rank, group.world_size, "intermediate_size")
        padding = config.intermediate_padding
        columns = (Column("gate_proj", size - padding, mine), Column("up_proj", size - padding, mine))
        self.gate_up_proj = MergedColumnLinear(
            config.hidden_size, columns, config.mlp_bias, runtime, f"{name}.gate_up_proj"
        )
        self.activation = GatedActivation(config.activation, len(mine), runtime)
        self.down_proj = RowLinear(
            size, config.hidden_size, config.mlp_bias, runtime, "intermediate_size", f"{name}.down_proj", padding
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x [T, hidden]`` to ``[T, hidden]``."""
        result: torch.Tensor = self.down_proj(self.activation(self.gate_up_proj(x)))
        return result
