"""The gated feed-forward network behind its norm: ``down(act(gate(x)) * up(x))``."""

from __future__ import annotations

from torch import nn

from atom_core.config import ModelConfig
from atom_core.layers.gated_activation import GatedLinear
from atom_core.layers.linear import Column, MergedColumnLinear, RowLinear
from atom_core.layers.norm import RMSNorm, Stream
from atom_core.layers.parameters import share
from atom_core.runtime import Runtime


class GatedMLP(nn.Module):
    """See the module's text; gate and up are one weight."""

    def __init__(self, config: ModelConfig, norm: RMSNorm, runtime: Runtime, name: str) -> None:
        super().__init__()
        group = runtime.tensor_parallel
        size = config.intermediate_size
        mine = share(size, group.rank, group.world_size, "intermediate_size")
        padding = config.padding.intermediate_size
        columns = (Column("gate_proj", size - padding, mine), Column("up_proj", size - padding, mine))
        self.gate_up_proj = MergedColumnLinear(
            config.hidden_size, columns, config.mlp_bias, runtime, f"{name}.gate_up_proj"
        )
        self.down_proj = RowLinear(
            size, config.hidden_size, config.mlp_bias, runtime, "intermediate_size", f"{name}.down_proj", padding
        )
        self.enter = GatedLinear(norm, self.gate_up_proj, config.activation, self.down_proj, runtime)

    def forward(self, stream: Stream) -> Stream:
        """Read the stream's norm and add to it."""
        activated, residual = self.enter(stream)
        return self.down_proj.add(activated, residual)
