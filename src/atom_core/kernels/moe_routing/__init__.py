"""The experts of each token, and their weights.

``logits``: ``[T, E]`` of the router, or with a gate of shared experts in column ``E``, and unused columns after it;
optionally a correction ``[E]`` in float32. The results are ``weights [T, k]`` float32 and ``experts [T, k]`` int32, in
no particular order. In float32 throughout:

    scores  = softmax(logits) or sigmoid(logits)
    experts = the k with the largest scores + correction, within the selected groups
    weights = scale * scores[experts] (/ their sum, where renormalised)

With ``G`` equal groups of experts, ``top_groups`` groups are selected: those with the largest best member (DeepSeek V2,
arXiv 2405.04434) or the largest sum of their two best members (V3, arXiv 2412.19437; GLM 4.5).

With ``s`` shared experts both results are ``[T, k + s]``: the last columns are ``E .. E + s - 1``, with weights of 1,
or with a gate of its sigmoid. Without ``s`` the gate is not read: the shared experts' network is separate.

A softmax over the chosen logits only (Mixtral, GPT-OSS) equals a renormalised one over all.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from atom_core.kernels.aiter_library import why_no_aiter
from atom_core.kernels.moe_routing.reference import route
from atom_core.kernels.select import Implementation, Op, Target, always
from atom_core.kernels.triton_support import overlaps, why_no_triton
from atom_core.types import RoutingConfig

#: Largest number of experts for one program of the Triton kernel.
_MAX_EXPERTS = 1024


RoutingKernel = Callable[[torch.Tensor, torch.Tensor | None], tuple[torch.Tensor, torch.Tensor]]


def _aiter_supports(spec: RoutingConfig, target: Target) -> str | None:
    if reason := why_no_aiter(target):
        return reason
    from atom_core.kernels.moe_routing.aiter_kernel import why_not

    return why_not(spec)


def _build_aiter(spec: RoutingConfig, target: Target) -> RoutingKernel:
    from atom_core.kernels.moe_routing.aiter_kernel import build  # imported only when chosen

    return build(spec)


def _triton_supports(spec: RoutingConfig, target: Target) -> str | None:
    if reason := why_no_triton(target):
        return reason
    if spec.num_experts > _MAX_EXPERTS:
        return f"The Triton kernel is for up to {_MAX_EXPERTS} experts, not for {spec.num_experts}."
    return None


def _build_triton(spec: RoutingConfig, target: Target) -> RoutingKernel:
    from atom_core.kernels.moe_routing.triton_kernel import route as launch  # needs triton, which a CPU may lack

    return partial(launch, spec=spec, overlap=overlaps(target))


MOE_ROUTING: Op[RoutingConfig, RoutingKernel] = Op(
    "moe_routing",
    (
        Implementation("aiter", _aiter_supports, _build_aiter),
        Implementation("triton", _triton_supports, _build_triton),
        Implementation("reference", always, lambda spec, target: partial(route, spec=spec)),
    ),
)
