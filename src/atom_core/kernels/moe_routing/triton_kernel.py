"""Routing in Triton: one program per token, which takes the largest score k times."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from atom_core.kernels.custom_op import custom_op
from atom_core.kernels.eviction import EVICT_LAST
from atom_core.kernels.launch import entry_kernel
from atom_core.kernels.triton_support import launch_options, next_power_of_2

if TYPE_CHECKING:
    from atom_core.types import RoutingConfig


#: The score of an expert that is already chosen: below the bits of any score.
_TAKEN: tl.constexpr = tl.constexpr(-(1 << 31))


@triton.jit
def _largest(numbers, place, AXIS: tl.constexpr):
    """The largest value along an axis and its first index; NaN is larger than nothing."""
    most = tl.max(numbers, AXIS, keep_dims=True)
    first = tl.min(tl.where(numbers == most, place, 1 << 30), AXIS, keep_dims=True)
    return most, first


@entry_kernel
@triton.jit
def _route(
    logits,
    correction,
    weights,
    experts,
    scale,
    stride,
    E: tl.constexpr,
    TOP_K: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUPS_PADDED: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    TWO: tl.constexpr,
    SIGMOID: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    SIZE: tl.constexpr,
    K_PADDED: tl.constexpr,
    SHARED: tl.constexpr,
    SHARED_GATE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """``SIZE``: experts of a group, ``GROUPS_PADDED``: groups, rounded up to powers of two; ``SHARED``: experts."""
    EACH: tl.constexpr = E // GROUPS
    token = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, GROUPS_PADDED)[:, None]
    member = tl.arange(0, SIZE)[None, :]
    exists = (group < GROUPS) & (member < EACH)
    expert = group * EACH + member
    if correction is not None:
        corrected_by = tl.load(correction + expert, mask=exists, other=0.0).to(tl.float32)
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    scores = tl.load(logits + token * stride + expert, mask=exists, other=float("-inf")).to(tl.float32)
    if SIGMOID:
        scores = 1.0 / (1.0 + tl.exp(-scores))
    else:
        scores = tl.exp(scores - tl.max(tl.max(scores, 1), 0))
        scores /= tl.sum(tl.sum(scores, 1), 0)
    ranked = scores
    if correction is not None:
        ranked += corrected_by
    ranked = tl.where(exists, ranked, float("-inf"))
    if GROUPS > 1:
        of_group, first = _largest(ranked, member, 1)
        if TWO:
            second = tl.max(tl.where(member == first, float("-inf"), ranked), 1, keep_dims=True)
            of_group += tl.where(second == float("-inf"), 0.0, second)
        of_group = tl.where(group < GROUPS, of_group, float("-inf"))
        let_in = group < 0
        for _ in tl.static_range(TOP_GROUPS):
            _, best = _largest(tl.where(let_in, float("-inf"), of_group), group, 0)
            let_in |= group == best
        ranked = tl.where(let_in, ranked, float("-inf"))
    # Integers in the same order, which have no NaN, and a value below all of them.
    bits = tl.where(ranked == ranked, ranked, float("-inf")).to(tl.int32, bitcast=True)
    left = tl.where(exists, bits ^ ((bits >> 31) & 0x7FFFFFFF), _TAKEN)
    place = tl.arange(0, K_PADDED)
    chosen = tl.zeros([K_PADDED], tl.int32)
    for k in tl.static_range(TOP_K):
        most = tl.max(tl.max(left, 1), 0)
        best = tl.min(tl.min(tl.where(left == most, expert, E), 1), 0)
        chosen = tl.where(place == k, best, chosen)
        left = tl.where(expert == best, _TAKEN, left)
    is_chosen = (expert[None, :, :] == chosen[:, None, None]) & exists[None, :, :]
    given = tl.sum(tl.sum(tl.where(is_chosen, scores[None, :, :], 0.0), 2), 1)
    given = tl.where(place < TOP_K, given, 0.0)
    if RENORMALIZE:
        given /= tl.maximum(tl.sum(given, 0), 1e-20)
    weights += token * (TOP_K + SHARED)
    experts += token * (TOP_K + SHARED)
    tl.store(weights + place, given * scale, mask=place < TOP_K, eviction_policy=EVICT_LAST)
    tl.store(experts + place, chosen, mask=place < TOP_K, eviction_policy=EVICT_LAST)
    common = 1.0
    if SHARED_GATE and SHARED > 0:
        common = 1.0 / (1.0 + tl.exp(-tl.load(logits + token * stride + E).to(tl.float32)))
    for number in tl.static_range(SHARED):
        tl.store(weights + (TOP_K + number), common, eviction_policy=EVICT_LAST)
        tl.store(experts + (TOP_K + number), E + number, eviction_policy=EVICT_LAST)


def route(
    logits: torch.Tensor, correction: torch.Tensor | None, spec: RoutingConfig, overlap: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """See :mod:`atom_core.kernels.moe_routing`."""
    groups = spec.num_groups
    return _routed(
        logits,
        correction,
        spec.num_experts,
        spec.top_k,
        groups,
        spec.top_groups,
        spec.group_score == "two largest",
        spec.scoring == "sigmoid",
        spec.renormalize,
        spec.scale,
        spec.shared,
        spec.shared_gate,
        overlap,
    )


def _fake(
    logits: torch.Tensor,
    correction: torch.Tensor | None,
    num_experts: int,
    top_k: int,
    groups: int,
    top_groups: int,
    two: bool,
    sigmoid: bool,
    renormalize: bool,
    scale: float,
    shared: int,
    shared_gate: bool,
    overlap: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (logits.shape[0], top_k + shared)
    return logits.new_empty(shape, dtype=torch.float32), logits.new_empty(shape, dtype=torch.int32)


@custom_op("moe_routing", _fake)
def _routed(
    logits: torch.Tensor,
    correction: torch.Tensor | None,
    num_experts: int,
    top_k: int,
    groups: int,
    top_groups: int,
    two: bool,
    sigmoid: bool,
    renormalize: bool,
    scale: float,
    shared: int,
    shared_gate: bool,
    overlap: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    assert logits.shape[1] >= num_experts + shared_gate
    assert logits.stride(1) == 1
    weights = torch.empty(logits.shape[0], top_k + shared, dtype=torch.float32, device=logits.device)
    experts = torch.empty(logits.shape[0], top_k + shared, dtype=torch.int32, device=logits.device)
    if logits.shape[0]:
        _route[(logits.shape[0],)](
            logits,
            correction,
            weights,
            experts,
            scale,
            logits.stride(0),
            E=num_experts,
            TOP_K=top_k,
            GROUPS=groups,
            GROUPS_PADDED=next_power_of_2(groups),
            TOP_GROUPS=top_groups,
            TWO=two,
            SIGMOID=sigmoid,
            RENORMALIZE=renormalize,
            SIZE=next_power_of_2(num_experts // groups),
            K_PADDED=next_power_of_2(top_k),
            SHARED=shared,
            SHARED_GATE=shared_gate,
            OVERLAP=overlap,
            num_warps=1,
            **launch_options(overlap),
        )
    return weights, experts
