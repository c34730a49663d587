"""Mixture of experts, in place of a feed-forward network.

Each tensor-parallel rank has a shard of every expert's intermediate size, or, with expert parallelism, some of the
experts. All ranks see all tokens, and their partial sums are added. Shared experts run as routed experts that every
token chooses, or as a separate network, which is sharded in either case. Their gate, where they have one, is a row of
the router's weight, after the experts'.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import cast

import torch
from torch import nn

from atom_core.config import MoEConfig
from atom_core.kernels.gated_sum import GATED_SUM, GatedSumKernel, GatedSumSpec
from atom_core.kernels.moe_routing import MOE_ROUTING
from atom_core.layers.expert_shards import shared_as_routed
from atom_core.layers.experts import Experts
from atom_core.layers.gated_activation import GatedActivation
from atom_core.layers.linear import Column, Linear, MergedColumnLinear, RowLinear
from atom_core.layers.linear_methods import Shard
from atom_core.layers.parameters import Placement, empty_parameter, share
from atom_core.quant import Unquantized
from atom_core.runtime import Runtime
from atom_core.types import Activation


class Router(Linear):
    """From tokens to router logits, with the shared experts' gate; never quantised, and replicated on every rank."""

    def __init__(self, config: MoEConfig, hidden_size: int, runtime: Runtime, name: str) -> None:
        routing = config.routing
        count = routing.num_experts
        names = config.names
        assert not (routing.shared_gate and config.bias), "no known gate of shared experts has a bias"
        columns, folder = range(hidden_size), f"../../{names.module}"
        shards = [Shard(f"{folder}.{names.router}", count, hidden_size, range(count), columns)]
        if routing.shared_gate:
            rows = range(routing.num_logits - count)
            shards.append(Shard(f"{folder}.{names.shared_gate}", 1, hidden_size, rows, columns, count))
        wide = replace(runtime, quant=Unquantized(), dtype=torch.float32)
        own = wide if config.float32_router else replace(wide, dtype=runtime.dtype)
        super().__init__(
            hidden_size, routing.num_logits, config.bias, own, name, shards, float32_result=config.float32_scores
        )
        self.dtype = own.dtype
        self.e_score_correction_bias = empty_parameter(wide, count) if routing.correction else None
        self.select = runtime.kernels.select(MOE_ROUTING, routing)

    def choose(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """``logits [T, experts]``, with the gate of shared experts, to weights and experts, both ``[T, k]``."""
        return self.select(logits, self.e_score_correction_bias)

    def placements(self) -> Iterator[tuple[str, str, Placement]]:
        """The layer's, and the score correction."""
        yield from super().placements()
        if self.e_score_correction_bias is not None:
            name = "e_score_correction_bias"
            yield self.shards[0].module, name, self.shards[0].of_rows(self.e_score_correction_bias)


class SharedExpert(nn.Module):
    """The shared experts of a layer as one network, as checkpoints store them."""

    def __init__(
        self, config: MoEConfig, hidden_size: int, activation: Activation, runtime: Runtime, name: str
    ) -> None:
        super().__init__()
        group, size, what = runtime.tensor_parallel, config.shared_size, config.shared_size_key
        mine = share(size, group.rank, group.world_size, what)
        columns = (Column("gate_proj", size, mine), Column("up_proj", size, mine))
        self.gate_up_proj = MergedColumnLinear(hidden_size, columns, False, runtime, f"{name}.gate_up_proj")
        self.activation = GatedActivation(activation, len(mine), runtime)
        self.down_proj = RowLinear(size, hidden_size, False, runtime, what, f"{name}.down_proj", reduce_results=False)
        #: The sum with the output, which is scaled by the gate; None: there is no gate.
        self.add_gated: GatedSumKernel | None = None
        self.gate_column = config.routing.num_experts
        if config.shared_gate:
            self.add_gated = runtime.kernels.select(GATED_SUM, GatedSumSpec(hidden_size, runtime.dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x [T, hidden]`` to this rank's partial sum ``[T, hidden]``."""
        partial: torch.Tensor = self.down_proj(self.activation(self.gate_up_proj(x)))
        return partial

    def add(self, total: torch.Tensor, y: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """``total + y``, both ``[T, hidden]``, ``y`` scaled by the gate among ``logits`` if there is one."""
        if self.add_gated is None:
            return total + y
        return self.add_gated(total, y, logits[:, self.gate_column, None])


class MoE(nn.Module):
    """See the module; ``index`` is the layer's."""

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
        routing = replace(config.routing, shared=shared, shared_gate=config.shared_gate)
        config = replace(config, routing=routing)
        self.router_name = config.names.router
        self.add_module(self.router_name, Router(config, hidden_size, runtime, f"{name}.{self.router_name}"))
        self.experts = Experts(config, hidden_size, activation, runtime, f"{name}.experts")
        self.shared_name = config.names.shared
        network = None
        if config.shared_size and not shared:
            network = SharedExpert(config, hidden_size, activation, runtime, f"{name}.{self.shared_name}")
        self.add_module(self.shared_name, network)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x [T, hidden]`` to ``[T, hidden]``."""
        logits = self.router_layer(x.to(self.router_layer.dtype))
        weights, experts = self.router_layer.choose(logits)
        rows = self.data_parallel.gather(x, weights, experts)
        self.report_routing(rows[2])
        partial = self.data_parallel.reduce(self.experts(*rows))
        if (shared := self.shared_layer) is not None:
            partial = shared.add(partial, shared(x), logits)
        return self.group.all_reduce(partial)

    @property
    def router_layer(self) -> Router:
        """The router, whose name depends on the checkpoint."""
        return cast(Router, getattr(self, self.router_name))

    @property
    def shared_layer(self) -> SharedExpert | None:
        """The shared experts' network, whose name depends on the checkpoint; None: there is none apart."""
        return cast("SharedExpert | None", getattr(self, self.shared_name))

    def report_routing(self, experts: torch.Tensor) -> None:
        """Report the chosen ``experts [T, k]`` without the shared ones, where the runtime asks for it."""
        if self.routed_experts is not None:
            self.routed_experts(self.index, experts[:, : self.top_k])
