"""A mixture of experts in place of a feed-forward network.

Each rank of a tensor-parallel group holds some of every expert's middle, or, with expert parallelism, some of the
experts. All see all tokens, and their sums are added up. Experts that all tokens share are routed ones that every token
chooses, or a network apart, which is in parts in either case.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import cast

import torch
from torch import nn

from atom_core.config import MoEConfig
from atom_core.kernels.moe_routing import MOE_ROUTING
from atom_core.layers.expert_parts import shared_as_routed
from atom_core.layers.experts import Experts
from atom_core.layers.gated_activation import GatedActivation
from atom_core.layers.linear import Column, Linear, MergedColumnLinear, RowLinear
from atom_core.layers.linear_methods import Part
from atom_core.layers.parameters import Placement, empty_parameter, share
from atom_core.quant import Unquantized
from atom_core.runtime import Runtime
from atom_core.types import Activation


class Router(Linear):
    """From a token to its experts; never quantised, and whole on every rank."""

    def __init__(self, config: MoEConfig, hidden_size: int, runtime: Runtime, name: str) -> None:
        routing = config.routing
        count = routing.num_experts
        names = config.names
        part = Part(f"../../{names.module}.{names.router}", count, hidden_size, range(count), range(hidden_size))
        wide = replace(runtime, quant=Unquantized(), dtype=torch.float32)
        own = wide if config.float32_router else replace(wide, dtype=runtime.dtype)
        super().__init__(hidden_size, count, config.bias, own, name, [part], config.float32_scores)
        self.dtype = own.dtype
        self.e_score_correction_bias = empty_parameter(wide, count) if routing.correction else None
        self.select = runtime.kernels.select(MOE_ROUTING, routing)

    def choose(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """``logits [T, experts]`` to weights and experts, both ``[T, k]``."""
        return self.select(logits, self.e_score_correction_bias)

    def placements(self) -> Iterator[tuple[str, str, Placement]]:
        """The layer's, and the correction."""
        yield from super().placements()
        if self.e_score_correction_bias is not None:
            name = "e_score_correction_bias"
            yield self.parts[0].module, name, self.parts[0].of_rows(self.e_score_correction_bias)


class SharedExpert(nn.Module):
    """What all tokens go through beside their own experts: one network, however many, as checkpoints have it."""

    def __init__(self, size: int, hidden_size: int, activation: Activation, runtime: Runtime, name: str) -> None:
        super().__init__()
        group, what = runtime.tensor_parallel, "n_shared_experts * moe_intermediate_size"
        mine = share(size, group.rank, group.world_size, what)
        columns = (Column("gate_proj", size, mine), Column("up_proj", size, mine))
        self.gate_up_proj = MergedColumnLinear(hidden_size, columns, False, runtime, f"{name}.gate_up_proj")
        self.activation = GatedActivation(activation, len(mine), runtime)
        self.down_proj = RowLinear(size, hidden_size, False, runtime, what, f"{name}.down_proj", reduce_results=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x [T, hidden]`` to this rank's partial sum ``[T, hidden]``."""
        partial: torch.Tensor = self.down_proj(self.activation(self.gate_up_proj(x)))
        return partial


class MoE(nn.Module):
    """See the module's text; ``index`` is the layer's."""

    def __init__(
        self,
        config: MoEConfig,
        hidden_size: int,
        activation: Activation,
        runtime: Runtime,
        name: str,
        index: int,
    ) -> None:
        super().__init__()
        self.index, self.top_k, self.routed_experts = index, config.routing.top_k, runtime.routed_experts
        self.group, self.data_parallel = runtime.tensor_parallel, runtime.data_parallel
        shared = shared_as_routed(config, runtime, name)
        config = replace(config, routing=replace(config.routing, shared=shared))
        self.router_name = config.names.router
        self.add_module(self.router_name, Router(config, hidden_size, runtime, f"{name}.{self.router_name}"))
        self.experts = Experts(config, hidden_size, activation, runtime, f"{name}.experts")
        self.shared_experts = (
            SharedExpert(config.shared_size, hidden_size, activation, runtime, f"{name}.shared_experts")
            if config.shared_size and not shared
            else None
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x [T, hidden]`` to ``[T, hidden]``."""
        weights, experts = self.router_layer.choose(self.router_layer(x.to(self.router_layer.dtype)))
        rows = self.data_parallel.gather(x, weights, experts)
        self.tell(rows[2])
        partial = self.data_parallel.reduce(self.experts(*rows))
        if self.shared_experts is not None:
            partial = partial + self.shared_experts(x)
        return self.group.all_reduce(partial)

    @property
    def router_layer(self) -> Router:
        """The router, whatever checkpoints call it."""
        return cast(Router, getattr(self, self.router_name))

    def tell(self, experts: torch.Tensor) -> None:
        """Whoever asks, which ``experts [T, k]`` were chosen; shared ones are behind them."""
        if self.routed_experts is not None:
            self.routed_experts(self.index, experts[:, : self.top_k])
