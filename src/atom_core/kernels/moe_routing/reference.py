"""Routing in torch, as it is defined."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from atom_core.types import RoutingConfig


def route(
    logits: torch.Tensor, correction: torch.Tensor | None, spec: RoutingConfig
) -> tuple[torch.Tensor, torch.Tensor]:
    """See :mod:`atom_core.kernels.moe_routing`."""
    wide = logits[:, : spec.num_experts].float()
    scores = wide.sigmoid() if spec.scoring == "sigmoid" else wide.softmax(-1)
    ranked = scores if correction is None else scores + correction.float()
    if spec.num_groups > 1:
        grouped = ranked.view(len(ranked), spec.num_groups, spec.num_experts // spec.num_groups)
        of_group = grouped.topk(min(2 if spec.group_score == "two largest" else 1, grouped.shape[-1]), -1)[0].sum(-1)
        let_in = torch.zeros_like(of_group, dtype=torch.bool)
        let_in.scatter_(-1, of_group.topk(spec.top_groups, -1)[1], True)
        ranked = grouped.masked_fill(~let_in[..., None], float("-inf")).flatten(-2)
    experts = ranked.topk(spec.top_k, -1)[1]
    weights = scores.gather(-1, experts)
    if spec.renormalize:
        # In float32 all sigmoids may be zero.
        weights = weights / weights.sum(-1, keepdim=True).clamp_min(1e-20)
    weights, experts = weights * spec.scale, experts.int()
    if spec.shared:
        everyone = torch.arange(spec.num_experts, spec.total_experts, dtype=torch.int32, device=experts.device)
        theirs = weights.new_ones(len(weights), 1)
        if spec.shared_gate:
            theirs = logits[:, spec.num_experts, None].float().sigmoid()
        weights = torch.cat([weights, theirs.expand(-1, spec.shared)], -1)
        experts = torch.cat([experts, everyone.expand(len(experts), -1)], -1)
    return weights, experts
