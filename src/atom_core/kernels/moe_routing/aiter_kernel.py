"""Routing by aiter; the kernel depends on the scoring function and on groups.

aiter's kernel for corrected scores in groups reads the correction in the dtype of the logits: both are float32 here.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch

from atom_core.kernels.aiter_library import aiter_function, require
from atom_core.kernels.custom_op import custom_op

if TYPE_CHECKING:
    from atom_core.kernels.moe_routing import RoutingKernel
    from atom_core.types import RoutingConfig

Routed = tuple[torch.Tensor, torch.Tensor]

#: A wave has one lane for each chosen expert.
_MAX_CHOSEN = 64


def why_not(spec: RoutingConfig) -> str | None:
    """None where aiter supports this routing, else the reason."""
    if spec.shared:
        # Most of its kernels can write to wider rows, but the other columns would take another launch. Its
        # moe_fused_gate, which has columns for shared experts, reads their weights from uninitialised memory.
        return "aiter's routing writes the experts that it chooses alone, and none that all tokens share."
    if spec.shared_gate:
        return "aiter's routing reads the logits of routed experts alone, without a gate of shared ones behind them."
    if spec.top_k > _MAX_CHOSEN:
        return f"aiter's routing chooses up to {_MAX_CHOSEN} experts, not {spec.top_k}."
    if spec.num_groups == 1:
        return None
    size = spec.num_experts // spec.num_groups
    if spec.num_groups not in (2, 4, 8) or size % 4:
        return (
            f"aiter's routing has 2, 4 or 8 groups of a multiple of 4 experts, not {spec.num_groups} groups of {size}."
        )
    if spec.group_score == "largest":
        return "aiter's routing corrects no scores of groups that go by one score." if spec.correction else None
    if spec.scoring != "sigmoid" or not spec.correction:
        return "aiter's routing by the two best of each group is for sigmoids that are corrected."
    if spec.num_groups != 8 and size != 4:
        # Only the kernels for 8 groups combine the results of the lanes that share a group.
        return (
            "aiter's routing finds the two best of each group where there are 8 groups, or 4 experts in each, "
            f"not {spec.num_groups} groups of {size}."
        )
    special = (spec.num_experts, spec.num_groups, spec.top_groups, spec.top_k) == (256, 8, 4, 8)
    if special and not spec.renormalize and spec.scale != 1.0:
        return "aiter's routing of DeepSeek V3's sizes scales weights only where it renormalises them."
    return None


def build(spec: RoutingConfig) -> RoutingKernel:
    """The kernel of a routing that :func:`why_not` accepts; it requires that aiter has the function."""
    top_k, renormalize, scale = spec.top_k, spec.renormalize, spec.scale
    if spec.num_groups > 1:
        groups = (spec.num_groups, spec.top_groups)
        if spec.group_score == "two largest":
            require("aiter.biased_grouped_topk_hip")
            return partial(_corrected_groups, top_k=top_k, groups=groups, renormalize=renormalize, scale=scale)
        require("aiter.grouped_topk")
        softmax = spec.scoring == "softmax"
        return partial(_groups_alone, top_k=top_k, groups=groups, renormalize=renormalize, softmax=softmax, scale=scale)
    if spec.scoring == "softmax" and not spec.correction and scale == 1.0:
        require("aiter.topk_softmax")
        return partial(_softmax_alone, top_k=top_k, renormalize=renormalize)
    require("aiter.topk_gating")
    return partial(_gating, top_k=top_k, renormalize=renormalize, scale=scale, scoring=spec.scoring)


def _softmax_alone(logits: torch.Tensor, correction: torch.Tensor | None, top_k: int, renormalize: bool) -> Routed:
    assert correction is None
    found: Routed = _topk_softmax(logits.contiguous(), top_k, renormalize)
    return found


def _gating(
    logits: torch.Tensor, correction: torch.Tensor | None, top_k: int, renormalize: bool, scale: float, scoring: str
) -> Routed:
    wide = None if correction is None else correction.float()
    found: Routed = _topk_gating(logits.contiguous(), wide, top_k, renormalize, scale, scoring)
    return found


def _groups_alone(
    logits: torch.Tensor,
    correction: torch.Tensor | None,
    top_k: int,
    groups: tuple[int, int],
    renormalize: bool,
    softmax: bool,
    scale: float,
) -> Routed:
    assert correction is None
    found: Routed = _grouped_topk(logits.contiguous(), top_k, *groups, renormalize, softmax, scale)
    return found


def _corrected_groups(
    logits: torch.Tensor,
    correction: torch.Tensor | None,
    top_k: int,
    groups: tuple[int, int],
    renormalize: bool,
    scale: float,
) -> Routed:
    assert correction is not None
    wide = logits.float().contiguous()
    found: Routed = _biased_grouped_topk(wide, correction.float(), top_k, *groups, renormalize, scale)
    return found


def _results(logits: torch.Tensor, top_k: int) -> Routed:
    shape = logits.shape[0], top_k
    return logits.new_empty(shape, dtype=torch.float32), logits.new_empty(shape, dtype=torch.int32)


@custom_op("aiter_topk_softmax", lambda logits, top_k, renormalize: _results(logits, top_k))
def _topk_softmax(logits: torch.Tensor, top_k: int, renormalize: bool) -> Routed:
    weights, experts = _results(logits, top_k)
    if len(logits):
        aiter_function("aiter.topk_softmax")(weights, experts, torch.empty_like(experts), logits, renormalize)
    return weights, experts


@custom_op("aiter_topk_gating", lambda logits, correction, top_k, renormalize, scale, scoring: _results(logits, top_k))
def _topk_gating(
    logits: torch.Tensor, correction: torch.Tensor | None, top_k: int, renormalize: bool, scale: float, scoring: str
) -> Routed:
    weights, experts = _results(logits, top_k)
    if len(logits):
        aiter_function("aiter.topk_gating")(
            weights,
            experts,
            logits,
            correction_bias=correction,
            need_renorm=renormalize,
            routed_scaling_factor=scale,
            score_func=scoring,
        )
    return weights, experts


@custom_op(
    "aiter_grouped_topk",
    lambda logits, top_k, groups, top_groups, renormalize, softmax, scale: _results(logits, top_k),
)
def _grouped_topk(
    logits: torch.Tensor, top_k: int, groups: int, top_groups: int, renormalize: bool, softmax: bool, scale: float
) -> Routed:
    weights, experts = _results(logits, top_k)
    if len(logits):
        aiter_function("aiter.grouped_topk")(
            logits,
            weights,
            experts,
            groups,
            top_groups,
            renormalize,
            is_softmax=softmax,
            routed_scaling_factor=scale,
        )
    return weights, experts


@custom_op(
    "aiter_biased_grouped_topk",
    lambda logits, correction, top_k, groups, top_groups, renormalize, scale: _results(logits, top_k),
)
def _biased_grouped_topk(
    logits: torch.Tensor,
    correction: torch.Tensor,
    top_k: int,
    groups: int,
    top_groups: int,
    renormalize: bool,
    scale: float,
) -> Routed:
    weights, experts = _results(logits, top_k)
    if len(logits):
        # aiter.biased_grouped_topk would switch to a kernel for many tokens that always renormalises.
        aiter_function("aiter.biased_grouped_topk_hip")(
            logits, correction, weights, experts, groups, top_groups, renormalize, routed_scaling_factor=scale
        )
    return weights, experts
