"""The ops, one folder each: ``reference.py`` defines the op in torch, and the other kernels are tested against it.

An op's ``__init__.py`` has its formula, spec and implementations; :mod:`atom_core.kernels.select` selects one.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import cast

from atom_core.kernels.aiter_library import check_installed
from atom_core.kernels.all_reduce_norm import ALL_REDUCE_NORM
from atom_core.kernels.attention import ATTENTION
from atom_core.kernels.decode_attention import DECODE_ATTENTION
from atom_core.kernels.embedding import EMBEDDING
from atom_core.kernels.experts import EXPERTS
from atom_core.kernels.fp8_block_linear import FP8_BLOCK_LINEAR
from atom_core.kernels.fp8_experts import FP8_EXPERTS
from atom_core.kernels.fp8_gated_activation import FP8_GATED_ACTIVATION
from atom_core.kernels.fp8_linear import FP8_LINEAR
from atom_core.kernels.fp8_rms_norm import FP8_RMS_NORM
from atom_core.kernels.gated_activation import GATED_ACTIVATION
from atom_core.kernels.gated_delta_net import GATED_DELTA_NET
from atom_core.kernels.gated_sum import GATED_SUM
from atom_core.kernels.greedy_tokens import GREEDY_TOKENS
from atom_core.kernels.head_linear import HEAD_LINEAR
from atom_core.kernels.linear import LINEAR
from atom_core.kernels.mla_absorbed_queries import MLA_ABSORBED_QUERIES
from atom_core.kernels.mla_absorbed_values import MLA_ABSORBED_VALUES
from atom_core.kernels.mla_attention import MLA_ATTENTION
from atom_core.kernels.mla_cache import MLA_CACHE
from atom_core.kernels.mla_fused_decode import MLA_FUSED_DECODE
from atom_core.kernels.mla_prefill import MLA_PREFILL
from atom_core.kernels.moe_routing import MOE_ROUTING
from atom_core.kernels.mxfp4_experts import MXFP4_EXPERTS
from atom_core.kernels.mxfp4_linear import MXFP4_LINEAR
from atom_core.kernels.normed_linear import NORMED_LINEAR
from atom_core.kernels.normed_router import NORMED_ROUTER
from atom_core.kernels.output_gate import OUTPUT_GATE
from atom_core.kernels.qk_norm_rope import QK_NORM_ROPE
from atom_core.kernels.qk_norm_rope_cache import QK_NORM_ROPE_CACHE
from atom_core.kernels.request_pages import REQUEST_PAGES
from atom_core.kernels.rms_norm import RMS_NORM
from atom_core.kernels.select import Implementation, KernelSet, Op, Target
from atom_core.kernels.shared_experts import SHARED_EXPERTS

#: Every op, in the order of a decoder layer and of the table at start-up.
OPS = cast(
    "tuple[Op[Hashable, object], ...]",
    (
        REQUEST_PAGES,
        EMBEDDING,
        RMS_NORM,
        FP8_RMS_NORM,
        ALL_REDUCE_NORM,
        LINEAR,
        FP8_LINEAR,
        FP8_BLOCK_LINEAR,
        MXFP4_LINEAR,
        NORMED_LINEAR,
        QK_NORM_ROPE,
        QK_NORM_ROPE_CACHE,
        ATTENTION,
        DECODE_ATTENTION,
        OUTPUT_GATE,
        GATED_DELTA_NET,
        MLA_CACHE,
        HEAD_LINEAR,
        MLA_ABSORBED_QUERIES,
        MLA_ABSORBED_VALUES,
        MLA_FUSED_DECODE,
        MLA_ATTENTION,
        MLA_PREFILL,
        GATED_ACTIVATION,
        FP8_GATED_ACTIVATION,
        SHARED_EXPERTS,
        NORMED_ROUTER,
        MOE_ROUTING,
        EXPERTS,
        FP8_EXPERTS,
        MXFP4_EXPERTS,
        GATED_SUM,
        GREEDY_TOKENS,
    ),
)


#: aiter's kernels that are used on request only, and why.
ON_REQUEST = {
    (ATTENTION.name, "aiter_shuffled"): "It has the cache in aiter's own order, which ATOM_SHUFFLED_CACHE=1 asks for.",
    (QK_NORM_ROPE_CACHE.name, "aiter"): (
        "It rounds the cosines and sines of rope to the model's dtype; ATOM_AITER_QK_NORM_ROPE_CACHE=1 asks for it."
    ),
    (GATED_DELTA_NET.name, "aiter"): (
        "It takes several times as many launches for a prompt, and moves more bytes; "
        "ATOM_KERNELS=gated_delta_net=aiter asks for it."
    ),
}

#: Kernels that are used on request only, on any GPU, and why.
UNTRIED = {
    (ALL_REDUCE_NORM.name, "triton"): (
        "No engine has run with it on several GPUs yet; ATOM_KERNELS=all_reduce_norm=triton asks for it."
    ),
}


def kernel_set(
    target: Target,
    forced: Mapping[str, str] | None = None,
    contributed: Mapping[str, Implementation[Hashable, object]] | None = None,
    excluded: Mapping[tuple[str, str], str] | None = None,
    *,
    with_aiter: bool = True,
    asked_by: Mapping[str, str] | None = None,
) -> KernelSet:
    """The kernels of all ops for ``target``; see :class:`KernelSet`.

    ``with_aiter``: whether aiter's kernels are used; if not, only forced ops use them.

    Raises:
        ValueError: ``target`` needs aiter and it is not installed; and the errors of :class:`KernelSet`.
    """
    passed_over = dict(UNTRIED) if target.kind != "cpu" else {}
    if target.kind == "rocm":
        passed_over |= ON_REQUEST
        if with_aiter:
            check_installed(target)
        else:
            own = ((op.name, it.name) for op in OPS for it in op.implementations)
            implementations = (*own, *((op, it.name) for op, it in (contributed or {}).items()))
            passed_over |= {key: "ATOM_AITER=0." for key in implementations if key[1].startswith("aiter")}
    excluded = passed_over | dict(excluded or {})
    return KernelSet(target, OPS, forced or {}, contributed or {}, excluded, asked_by or {})
