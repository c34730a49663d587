"""Tokens of a step that is timed go to given experts, however a random router scores them.

How many experts are read decides how long the step takes. Where the router decides it, what is rounded on the way does:
two tiles that differ in the order of their sums, and in nothing else, are then 2% apart.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from atom_core.config import ModelConfig
from atom_core.kernels.moe_routing import RoutingKernel
from atom_core.layers.moe import MoE
from atom_core.models.decoder import DecoderForCausalLM
from atom_core.types import RoutingConfig


@dataclass(frozen=True)
class GivenExperts:
    """A choice that is made as ever, by the kernel ``choose``, and answered with ``experts [tokens, k]``."""

    choose: RoutingKernel
    experts: torch.Tensor

    def __call__(self, logits: torch.Tensor, correction: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """See :mod:`atom_core.kernels.moe_routing`; of no more tokens than experts are given for."""
        weights, chosen = self.choose(logits, correction)
        assert len(chosen) <= len(self.experts)
        return weights, self.experts[: len(chosen)]


def given_experts(routing: RoutingConfig, tokens: int, seed: int) -> torch.Tensor:
    """int32 ``[tokens, k]``, shared experts included: at random, of no more groups than a router lets in."""
    generator = torch.Generator().manual_seed(seed)
    each = routing.num_experts // routing.num_groups
    groups = torch.rand(tokens, routing.num_groups, generator=generator).argsort(1)[:, : routing.top_groups]
    members = (groups[:, :, None] * each + torch.arange(each)).flatten(1)
    order = torch.rand(members.shape, generator=generator).argsort(1)[:, : routing.top_k]
    shared = torch.arange(routing.num_experts, routing.total_experts).expand(tokens, -1)
    return torch.cat([members.gather(1, order), shared], 1).int()


def send_to_given_experts(model: DecoderForCausalLM, config: ModelConfig, tokens: int) -> None:
    """Have every mixture of ``model`` send up to ``tokens`` tokens to experts of its own; see the module's text."""
    for index, (layer, described) in enumerate(zip(model.model.layers, config.layers, strict=True)):
        if described.moe is not None:
            mixture = layer.feed_forward
            assert isinstance(mixture, MoE)
            routing = replace(described.moe.routing, shared=mixture.experts.total - mixture.experts.routed)
            experts = given_experts(routing, tokens, seed=index).to(mixture.router_layer.weight.device)
            mixture.router_layer.select = GivenExperts(mixture.router_layer.select, experts)
