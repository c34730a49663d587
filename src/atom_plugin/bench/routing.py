"""Fixed routing for a timed step: tokens go to given experts, whatever a random router's scores are.

The number of experts that are read determines a step's time. With the router's own choice, rounding decides it: two
tiles that differ only in the order of their sums would then be 2% apart.
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
    """Runs the kernel ``choose`` and replaces its choice by ``experts [tokens, k]``."""

    choose: RoutingKernel
    experts: torch.Tensor

    def __call__(self, logits: torch.Tensor, correction: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """See :mod:`atom_core.kernels.moe_routing`; for at most as many tokens as ``experts`` has."""
        weights, chosen = self.choose(logits, correction)
        assert len(chosen) <= len(self.experts)
        return weights, self.experts[: len(chosen)]


def given_experts(routing: RoutingConfig, tokens: int, seed: int) -> torch.Tensor:
    """int32 ``[tokens, k]``: random experts from as many groups as the router allows, then the shared experts."""
    generator = torch.Generator().manual_seed(seed)
    each = routing.num_experts // routing.num_groups
    groups = torch.rand(tokens, routing.num_groups, generator=generator).argsort(1)[:, : routing.top_groups]
    members = (groups[:, :, None] * each + torch.arange(each)).flatten(1)
    order = torch.rand(members.shape, generator=generator).argsort(1)[:, : routing.top_k]
    shared = torch.arange(routing.num_experts, routing.total_experts).expand(tokens, -1)
    return torch.cat([members.gather(1, order), shared], 1).int()


def send_to_given_experts(model: DecoderForCausalLM, config: ModelConfig, tokens: int) -> None:
    """Fix the routing of up to ``tokens`` tokens in every MoE layer of ``model``."""
    for index, (layer, described) in enumerate(zip(model.model.layers, config.layers, strict=True)):
        if described.moe is not None:
            mixture = layer.feed_forward
            assert isinstance(mixture, MoE)
            routing = replace(described.moe.routing, shared=mixture.experts.total - mixture.experts.routed)
            experts = given_experts(routing, tokens, seed=index).to(mixture.router_layer.weight.device)
            mixture.router_layer.select = GivenExperts(mixture.router_layer.select, experts)
