"""Tokens of a step that is timed go to given experts, however a random router scores them.

How many experts are read decides how long the step takes. Where the router decides it, what is rounded on the way does:
two tiles that differ in the order of their sums, and in nothing else, are then 2% apart.
"""

from __future__ import annotations

import torch

from atom_core.config import ModelConfig, RoutingConfig
from atom_core.kernels.moe_routing import RoutingKernel
from atom_core.layers.moe import MoE
from atom_core.models.decoder import DecoderForCausalLM

#: Tokens that are sent to experts of their own; those beyond go where the first ones do.
MOST_TOKENS = 1024


class GivenExperts:
    """A choice that is made as ever, and answered with other experts: at random, the same whenever it is called.

    Args:
        choose: the kernel.
        routing: as many experts are given, of as many groups; shared ones behind them stay.
        seed: another one gives others.
    """

    def __init__(self, choose: RoutingKernel, routing: RoutingConfig, seed: int = 0) -> None:
        self.choose, self.routing = choose, routing
        self._routed = given_experts(routing, MOST_TOKENS, seed)
        self._given: torch.Tensor | None = None

    def __call__(self, logits: torch.Tensor, correction: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """See :mod:`atom_core.kernels.moe_routing`; the first call makes what later ones, captured or not, answer."""
        weights, experts = self.choose(logits, correction)
        if self._given is None or len(self._given) < len(experts):
            repeated = self._routed.repeat(-(-len(experts) // MOST_TOKENS), 1)
            shared = torch.arange(experts.shape[1] - self.routing.top_k) + self.routing.num_experts
            everyone = torch.cat([repeated, shared.expand(len(repeated), -1)], 1)
            self._given = everyone.to(experts.device, experts.dtype)
        return weights, self._given[: len(experts)]


def given_experts(routing: RoutingConfig, tokens: int, seed: int) -> torch.Tensor:
    """``[tokens, k]``: different ones for each token, of no more groups than a router lets in."""
    generator = torch.Generator().manual_seed(seed)
    each = routing.num_experts // routing.num_groups
    groups = torch.rand(tokens, routing.num_groups, generator=generator).argsort(1)[:, : routing.top_groups]
    members = (groups[:, :, None] * each + torch.arange(each)).flatten(1)
    order = torch.rand(members.shape, generator=generator).argsort(1)[:, : routing.top_k]
    return members.gather(1, order)


def send_to_given_experts(model: DecoderForCausalLM, config: ModelConfig) -> None:
    """Have every mixture of ``model`` send tokens to experts of its own choice; see the module's text."""
    for index, (layer, described) in enumerate(zip(model.model.layers, config.layers, strict=True)):
        if described.moe is not None:
            assert isinstance(layer.mlp, MoE)
            layer.mlp.gate.select = GivenExperts(layer.mlp.gate.select, described.moe.routing, seed=index)
