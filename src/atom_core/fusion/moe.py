"""A mixture of experts: norm, router, experts, shared experts, residual addition."""

from __future__ import annotations

import torch

from atom_core.fusion.linear import NormedLinear, ResidualLinear, Stream, StreamNorm, norm_and_few_outputs
from atom_core.fusion.mlp import fused_activation
from atom_core.kernels.fp8_inputs import LinearInput
from atom_core.layers.moe import MoE, SharedExpert
from atom_core.runtime import Runtime


class FusedSharedExpert:
    """The shared experts as a separate network."""

    def __init__(self, norm: StreamNorm, shared: SharedExpert, runtime: Runtime) -> None:
        self.gate_up_proj = shared.gate_up_proj
        self.plain_activation = shared.activation.kernel
        self.activate = fused_activation(shared.activation, shared.down_proj, runtime)
        self.normed = NormedLinear(norm, shared.gate_up_proj, shared.activation.spec.activation, runtime)
        self.layer, self.down = shared, ResidualLinear(shared.down_proj)

    def activated(self, x: torch.Tensor) -> LinearInput:
        """``act(gate_up(x))`` of ``x [T, hidden]``."""
        return self.activate(self.gate_up_proj.forward(x))

    def partial(self, x: torch.Tensor, total: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """``total [T, hidden]`` and this rank's partial sum for ``x [T, hidden]``; see :meth:`SharedExpert.add`."""
        return self.layer.add(total, self.layer.down_proj.partial(self.activated(x)), logits)

    def add(self, activated: LinearInput, residual: torch.Tensor, logits: torch.Tensor) -> Stream:
        """Add the rest of the network, with one rank, to ``residual [T, hidden]``, which may be written to."""
        if self.layer.add_gated is None:
            return self.down(activated, residual)
        return Stream(None, self.layer.add(residual, self.layer.down_proj.partial(activated), logits))

    def activated_stream(self, stream: Stream) -> torch.Tensor:
        """``act(gate_up(norm(stream)))`` of a stream without remaining additions."""
        y = self.normed.fused(stream)
        return self.plain_activation(self.normed.product(stream)[0]) if y is None else y


class FusedMoE:
    """A norm and the mixture after it, added to the stream."""

    def __init__(self, norm: StreamNorm, moe: MoE, runtime: Runtime) -> None:
        self.norm, self.moe, self.router, self.experts = norm, moe, moe.router_layer, moe.experts
        self.data_parallel = runtime.data_parallel
        self.is_partial = runtime.tensor_parallel.world_size > 1
        self.normed_router = norm_and_few_outputs(norm, self.router, runtime.kernels)
        self.shared = None if moe.shared_layer is None else FusedSharedExpert(norm, moe.shared_layer, runtime)
        #: Whether the experts' sum is added to the stream without sums over ranks.
        self.adds = not self.is_partial and self.data_parallel.world_size == 1
        #: Largest number of tokens for which the products that read the norm (experts and router) apply it themselves.
        self.max_normed = self.experts.max_normed if self.adds and self.router.dtype == runtime.dtype else 0
        self.router_logits = NormedLinear(norm, self.router, None, runtime) if self.max_normed else None

    def __call__(self, stream: Stream) -> Stream:
        """The stream after the mixture."""
        if stream.last is None and not torch.compiler.is_compiling() and 0 < len(stream.residual) <= self.max_normed:
            return self._normed_in_products(stream)
        x, residual, logits = self._routed(stream)
        weights, experts = self.router.choose(logits)
        rows = self.data_parallel.gather(x, weights, experts)
        self.moe.report_routing(rows[2])
        if self.adds and (summed := self.experts.add(x, weights, experts, residual)) is not None:
            return (
                Stream(None, summed)
                if self.shared is None
                else self.shared.add(self.shared.activated(x), summed, logits)
            )
        mine = self.data_parallel.reduce(self.experts.forward(*rows))
        if self.shared is not None:
            mine = self.shared.partial(x, mine, logits)
        return Stream(mine, residual, self.is_partial)

    def _routed(self, stream: Stream) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The normed stream, the updated stream, and the tokens' logits, see :class:`Router`."""
        # Tracing would fix a branch on the number of tokens.
        if self.normed_router is not None and stream.last is None and not torch.compiler.is_compiling():
            x = stream.residual
            if len(x) in self.normed_router.tokens:
                operands = self.router.method.operands(self.router)
                normed, logits = self.normed_router(x, self.norm.weight, self.norm.eps, operands)
                return normed, x, logits
        normed, summed = self.norm(stream)
        return normed, summed, self.router.forward(normed.to(self.router.dtype))

    def _normed_in_products(self, stream: Stream) -> Stream:
        assert self.router_logits is not None
        logits, residual = self.router_logits(stream)
        # Before the experts write to the stream that it reads.
        shared = None if self.shared is None else self.shared.activated_stream(stream)
        weights, experts = self.router.choose(logits)
        self.moe.report_routing(experts)
        summed = self.experts.add_normed(residual, self.norm.weight, self.norm.eps, weights, experts)
        if self.shared is None or shared is None:
            return Stream(None, summed)
        return self.shared.add(shared, summed, logits)
