"""A mixture of experts behind its norm, in place of a feed-forward network.

Each rank of a tensor-parallel group holds some of every expert's middle, or, with expert parallelism, some of the
experts. All see all tokens, and their sums are added up. An expert that all tokens share is in parts in either case.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import nn

from atom_core.config import Activation, MoEConfig
from atom_core.kernels.experts import EXPERTS, ExpertsSpec, ExpertWeights
from atom_core.kernels.gated_activation import GATED_ACTIVATION, GatedActivationSpec
from atom_core.kernels.moe_routing import MOE_ROUTING
from atom_core.layers.fused_experts import MiddlePlacement, PairsPlacement
from atom_core.layers.linear import Column, Linear, MergedColumnLinear, RowLinear
from atom_core.layers.linear_methods import Part
from atom_core.layers.mxfp4_experts import Mxfp4ExpertsMethod
from atom_core.layers.norm import RMSNorm, Stream
from atom_core.layers.parameters import ParameterLayer, Placement, checkpoint_module, empty_parameter, share
from atom_core.quant import Mxfp4Config, Unquantized
from atom_core.runtime import Runtime


class Router(Linear):
    """From a token to its experts; never quantised, and whole on every rank."""

    def __init__(self, config: MoEConfig, hidden_size: int, runtime: Runtime, name: str) -> None:
        routing = config.routing
        count = routing.num_experts
        names = config.names
        part = Part(f"../../{names.module}.{names.router}", count, hidden_size, range(count), range(hidden_size))
        wide = replace(runtime, quant=Unquantized(), dtype=torch.float32)
        own = wide if config.float32_router else replace(wide, dtype=runtime.dtype)
        super().__init__(hidden_size, count, config.bias, own, name, [part])
        self.dtype = own.dtype
        self.e_score_correction_bias = empty_parameter(wide, count) if routing.correction else None
        self.select = runtime.kernels.select(MOE_ROUTING, routing)

    def route(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """``x [T, hidden]`` to weights and experts, both ``[T, k]``."""
        return self.select(self(x.to(self.dtype)), self.e_score_correction_bias)

    def placements(self) -> Iterator[tuple[str, str, Placement]]:
        """The layer's, and the correction."""
        yield from super().placements()
        if self.e_score_correction_bias is not None:
            name = "e_score_correction_bias"
            yield self.parts[0].module, name, self.parts[0].of_rows(self.e_score_correction_bias)


class Experts(ParameterLayer):
    """All experts of a layer, each a matrix in two tensors; checkpoints have them one by one, or all in two tensors."""

    #: Where they are in MXFP4: see :mod:`atom_core.layers.mxfp4_experts`.
    gate_up_proj_blocks: nn.Parameter
    gate_up_proj_scales: nn.Parameter
    down_proj_blocks: nn.Parameter
    down_proj_scales: nn.Parameter

    def __init__(
        self, config: MoEConfig, hidden_size: int, activation: Activation, runtime: Runtime, name: str
    ) -> None:
        super().__init__()
        self.names = config.names
        base = checkpoint_module(name, self._folder)
        first = base if config.fused else f"{base}.0"
        matrices = [f"{first}.{part}" for part in (self.names.gate, self.names.up, self.names.down)]
        if runtime.quant.linear(matrices) is not None:
            raise ValueError(f"The experts of {base} are quantised, which mixtures of experts do not support yet.")
        group, routing = runtime.tensor_parallel, config.routing
        self.hidden_size, self.size, self.total = hidden_size, config.intermediate_size, routing.num_experts
        #: This rank's experts, and what it has of the middle of each.
        self.held, self.mine = range(self.total), range(self.size)
        if runtime.expert_parallel:
            self.held = share(self.total, group.rank, group.world_size, "num_experts")
        else:
            self.mine = share(self.size, group.rank, group.world_size, "moe_intermediate_size")
        count, size = len(self.held), len(self.mine)
        self.fused = config.fused
        self.gate_up_proj_bias = empty_parameter(runtime, count, 2 * size) if config.bias else None
        self.down_proj_bias = empty_parameter(runtime, count, hidden_size) if config.bias else None
        #: An expert that several ranks share has its last bias added by one of them.
        self.adds_bias = runtime.expert_parallel or group.rank == 0
        #: How they are kept where they are in MXFP4, which only what is fused can be.
        self.method = Mxfp4ExpertsMethod() if isinstance(runtime.quant, Mxfp4Config) else None
        if self.method is not None:
            assert self.fused
            self.method.create(self, activation, routing.top_k, runtime)
            return
        self.gate_up_proj = empty_parameter(runtime, count, 2 * size, hidden_size)
        self.down_proj = empty_parameter(runtime, count, hidden_size, size)
        self.kernel = runtime.kernels.select(
            EXPERTS,
            ExpertsSpec(
                self.held.start, count, hidden_size, size, routing.top_k, activation, config.bias, runtime.dtype
            ),
        )

    def forward(self, x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        """``x [T, hidden]``, weights and experts ``[T, k]`` to this rank's part of the sum, ``[T, hidden]``."""
        last = self.down_proj_bias if self.adds_bias else None
        if self.method is not None:
            return self.method.apply(self, x, weights, experts, last)
        layer = ExpertWeights(self.gate_up_proj, self.down_proj, self.gate_up_proj_bias, last)
        return self.kernel(x, weights, experts, layer)

    def placements(self) -> Iterator[tuple[str, str, Placement]]:
        """Three matrices an expert, or what is fused."""
        if self.fused:
            yield from self._fused()
            return
        first, count = self.mine.start, len(self.mine)
        wide, narrow = (self.size, self.hidden_size), (self.hidden_size, self.size)
        for index, expert in enumerate(self.held):
            module = f"{self._folder}.{expert}"
            gate_up, down = self.gate_up_proj[index], self.down_proj[index]
            for part, target in ((self.names.gate, 0), (self.names.up, count)):
                placement = Placement(gate_up, wide, 0, first, target, count, held_by="gate_up_proj")
                yield f"{module}.{part}", "weight", placement
            yield (
                f"{module}.{self.names.down}",
                "weight",
                Placement(down, narrow, 1, first, 0, count, held_by="down_proj"),
            )

    def _fused(self) -> Iterator[tuple[str, str, Placement]]:
        total, wide, hidden, mine = self.total, 2 * self.size, self.hidden_size, (self.held, self.mine)
        if self.method is not None:
            yield from self.method.placements(self)
        else:
            yield "", "gate_up_proj", PairsPlacement(self.gate_up_proj, (total, hidden, wide), share=mine)
            yield "", "down_proj", MiddlePlacement(self.down_proj, (total, self.size, hidden), share=mine)
        if self.gate_up_proj_bias is not None and self.down_proj_bias is not None:
            yield "", "gate_up_proj_bias", PairsPlacement(self.gate_up_proj_bias, (total, wide), share=mine)
            held = self.held
            yield "", "down_proj_bias", Placement(self.down_proj_bias, (total, hidden), 0, held.start, 0, len(held))

    def elsewhere(self) -> Iterator[str]:
        """Other ranks' experts."""
        return (f"{self._folder}.{expert}" for expert in range(self.total) if expert not in self.held)

    @property
    def _folder(self) -> str:
        return f"../../{self.names.module}.experts"


class SharedExpert(nn.Module):
    """What all tokens go through beside their own experts, which checkpoints have as one network, however many."""

    def __init__(self, size: int, hidden_size: int, activation: Activation, runtime: Runtime, name: str) -> None:
        super().__init__()
        group, what = runtime.tensor_parallel, "n_shared_experts * moe_intermediate_size"
        mine = share(size, group.rank, group.world_size, what)
        columns = (Column("gate_proj", size, mine), Column("up_proj", size, mine))
        self.gate_up_proj = MergedColumnLinear(hidden_size, columns, False, runtime, f"{name}.gate_up_proj")
        self.activate = runtime.kernels.select(
            GATED_ACTIVATION, GatedActivationSpec(activation, len(mine), runtime.dtype)
        )
        self.down_proj = RowLinear(size, hidden_size, False, runtime, what, f"{name}.down_proj")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x [T, hidden]`` to this rank's part of the answer, ``[T, hidden]``."""
        return self.down_proj.part(self.activate(self.gate_up_proj(x)))


class MoE(nn.Module):
    """See the module's text."""

    def __init__(
        self,
        config: MoEConfig,
        hidden_size: int,
        activation: Activation,
        norm: RMSNorm,
        runtime: Runtime,
        name: str,
    ) -> None:
        super().__init__()
        self.enter = (norm,)  # it is the decoder layer's, whose parameter it stays
        self.group = runtime.tensor_parallel
        self.gate = Router(config, hidden_size, runtime, f"{name}.gate")
        self.experts = Experts(config, hidden_size, activation, runtime, f"{name}.experts")
        self.shared_experts = (
            SharedExpert(config.shared_size, hidden_size, activation, runtime, f"{name}.shared_experts")
            if config.shared_size
            else None
        )

    def forward(self, stream: Stream) -> Stream:
        """Read the stream's norm and add to it."""
        x, residual = self.enter[0](stream)
        weights, experts = self.gate.route(x)
        mine = self.experts(x, weights, experts)
        if self.shared_experts is not None:
            mine = mine + self.shared_experts(x)
        return Stream(self.group.all_reduce(mine), residual)
