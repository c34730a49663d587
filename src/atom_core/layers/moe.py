"""A mixture of experts behind its norm, in place of a feed-forward network.

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
from atom_core.kernels.normed_router import NORMED_ROUTER, NormedRouterSpec
from atom_core.kernels.rms_norm import RMS_NORM
from atom_core.layers.expert_parts import shared_as_routed
from atom_core.layers.experts import Experts
from atom_core.layers.gated_activation import GatedActivation
from atom_core.layers.linear import Column, Linear, MergedColumnLinear, RowLinear
from atom_core.layers.linear_methods import Part
from atom_core.layers.norm import PartStream, RMSNorm, Stream
from atom_core.layers.normed_linear import NormedLinear
from atom_core.layers.parameters import Placement, empty_parameter, share
from atom_core.quant import Unquantized
from atom_core.runtime import Runtime
from atom_core.types import Activation


class Router(Linear):
    """From a token to its experts; never quantised, and whole on every rank."""

    def __init__(self, config: MoEConfig, hidden_size: int, norm: RMSNorm, runtime: Runtime, name: str) -> None:
        routing = config.routing
        count = routing.num_experts
        names = config.names
        part = Part(f"../../{names.module}.{names.router}", count, hidden_size, range(count), range(hidden_size))
        wide = replace(runtime, quant=Unquantized(), dtype=torch.float32)
        own = wide if config.float32_router else replace(wide, dtype=runtime.dtype)
        super().__init__(hidden_size, count, config.bias, own, name, [part], config.float32_scores)
        self.dtype = own.dtype
        self.e_score_correction_bias = empty_parameter(wide, count) if routing.correction else None
        kernels = runtime.kernels
        self.select = kernels.select(MOE_ROUTING, routing)
        separate = (RMS_NORM.name, kernels.chosen(RMS_NORM, norm.spec)), self.method.chosen(self, kernels)
        self.fused = kernels.select(NORMED_ROUTER, NormedRouterSpec(separate)) if runtime.fuses_modules else None

    def behind_norm(self, stream: Stream, norm: RMSNorm) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The normed stream, the stream summed up, and the tokens' logits ``[T, experts]``."""
        # Where it is traced, a branch on the number of tokens would freeze it.
        if self.fused is not None and stream.last is None and not torch.compiler.is_compiling():
            x = stream.residual
            if len(x) in self.fused.tokens:
                normed, logits = self.fused(x, norm.weight, norm.eps, self.method.operands(self))
                return normed, x, logits
        normed, summed = norm(stream)
        return normed, summed, self(normed.to(self.dtype))

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

    def __init__(
        self, size: int, hidden_size: int, activation: Activation, norm: RMSNorm, runtime: Runtime, name: str
    ) -> None:
        super().__init__()
        group, what = runtime.tensor_parallel, "n_shared_experts * moe_intermediate_size"
        mine = share(size, group.rank, group.world_size, what)
        columns = (Column("gate_proj", size, mine), Column("up_proj", size, mine))
        self.gate_up_proj = MergedColumnLinear(hidden_size, columns, False, runtime, f"{name}.gate_up_proj")
        self.down_proj = RowLinear(size, hidden_size, False, runtime, what, f"{name}.down_proj")
        self.activate = GatedActivation(activation, self.down_proj, runtime)
        self.behind_norm = NormedLinear(norm, self.gate_up_proj, activation, runtime)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x [T, hidden]`` to this rank's part of the answer, ``[T, hidden]``."""
        return self.down_proj.part(self.activate(self.gate_up_proj(x)))

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> Stream:
        """The answer of the only rank, added to ``residual [T, hidden]``, which is written to."""
        return self.down_proj.add(self.activate(self.gate_up_proj(x)), residual)


class MoE(nn.Module):
    """See the module's text; ``index`` is the layer's."""

    def __init__(
        self,
        config: MoEConfig,
        hidden_size: int,
        activation: Activation,
        norm: RMSNorm,
        runtime: Runtime,
        name: str,
        index: int,
    ) -> None:
        super().__init__()
        self.enter = (norm,)  # it is the decoder layer's, whose parameter it stays
        self.index, self.top_k, self.routed_experts = index, config.routing.top_k, runtime.routed_experts
        self.group, self.replicas = runtime.tensor_parallel, runtime.data_parallel
        shared = shared_as_routed(config, runtime, name)
        config = replace(config, routing=replace(config.routing, shared=shared))
        self.router_name = config.names.router
        self.add_module(self.router_name, Router(config, hidden_size, norm, runtime, f"{name}.{self.router_name}"))
        self.experts = Experts(config, hidden_size, activation, runtime, f"{name}.experts")
        self.shared_experts = (
            SharedExpert(config.shared_size, hidden_size, activation, norm, runtime, f"{name}.shared_experts")
            if config.shared_size and not shared
            else None
        )
        #: Nothing comes between the experts' sum and the stream.
        self.adds = runtime.fuses_modules and self.group.world_size == self.replicas.world_size == 1
        self.fuses_modules = runtime.fuses_modules
        #: The gate behind the norm, for tokens so few that the experts do without what the norm would store.
        self.max_normed = self.experts.max_normed if self.adds and self.routing.dtype == runtime.dtype else 0
        self.gate_behind_norm = NormedLinear(norm, self.routing, None, runtime) if self.max_normed else None

    def forward(self, stream: Stream) -> Stream:
        """Read the stream's norm and add to it."""
        apart = stream.last is None and not torch.compiler.is_compiling()
        if apart and 0 < len(stream.residual) <= self.max_normed:
            return self._behind_norm(stream)
        x, residual, logits = self.routing.behind_norm(stream, self.enter[0])
        weights, experts = self.routing.choose(logits)
        rows = self.replicas.gather(x, weights, experts)
        self._tell(rows[2])
        if self.adds and (summed := self.experts.add(x, weights, experts, residual)) is not None:
            return Stream(None, summed) if self.shared_experts is None else self.shared_experts.add(x, summed)
        mine = self.replicas.reduce(self.experts(*rows))
        if self.shared_experts is not None:
            mine = mine + self.shared_experts(x)
        if not self.fuses_modules:
            mine = self.group.all_reduce(mine)
        elif self.group.world_size > 1:
            return PartStream(mine, residual)
        return Stream(mine, residual)

    @property
    def routing(self) -> Router:
        """The router, whatever checkpoints call it."""
        return cast(Router, getattr(self, self.router_name))

    def _behind_norm(self, stream: Stream) -> Stream:
        """As :meth:`forward`, with the norm within each product that reads it."""
        assert self.gate_behind_norm is not None
        logits, residual = self.gate_behind_norm(stream)
        # Before the experts write to what it reads.
        shared = None if self.shared_experts is None else self.shared_experts.behind_norm(stream)[0]
        weights, experts = self.routing.choose(logits)
        self._tell(experts)
        summed = self.experts.add_behind_norm(residual, self.enter[0], weights, experts)
        if self.shared_experts is None or shared is None:
            return Stream(None, summed)
        return self.shared_experts.down_proj.add(shared, summed)

    def _tell(self, experts: torch.Tensor) -> None:
        """Whoever asks, which ``experts [T, k]`` were chosen; shared ones are behind them."""
        if self.routed_experts is not None:
            self.routed_experts(self.index, experts[:, : self.top_k])
