"""Causal attention over cached latents for prompts, with keys and values expanded for each head: MLA as it is defined.

For each latent ``c_j`` of a request, and its rotated key ``k_j`` (DeepSeek-V2, arXiv 2405.04434):

    key[h, j] = expand[h, :N] c_j, k_j;    value[h, j] = expand[h, N:] c_j
    s_j = scale * q_i[h] . key[h, j];      o_i[h] = sum_j exp(s_j) value[h, j] / sum_j exp(s_j)

``q``: ``[T, H, N + R]``, any strides with a contiguous last dimension; ``expand``: ``[H, N + V, L]``; ``out``:
``[T, H, V]``, written for the plan's requests only. The cache has the step's rows already, and they are read from it
like those of earlier steps. The result is that of :mod:`atom_core.kernels.mla_attention`;
:mod:`atom_core.kernels.mla_prefill.plan` selects the requests for which this costs less.
"""

from __future__ import annotations

from typing import Protocol

import torch

from atom_core.batch import Batch
from atom_core.cache import LatentCacheView
from atom_core.kernels.aiter_library import why_no_aiter
from atom_core.kernels.cache_dtypes import why_unreadable
from atom_core.kernels.mla_attention import MlaAttentionSpec, triton_supports
from atom_core.kernels.mla_prefill.plan import PrefillPlan
from atom_core.kernels.mla_prefill.reference import ReferenceMlaPrefill
from atom_core.kernels.select import Implementation, Op, Target
from atom_core.kernels.triton_support import overlaps


class MlaPrefillKernel(Protocol):
    """An attention kernel bound to one layer's spec."""

    laid_out: int
    """Elements of temporary memory for each key and head, in addition to the expanded keys and values."""

    def __call__(
        self,
        q: torch.Tensor,
        expand: torch.Tensor,
        cache: LatentCacheView,
        batch: Batch,
        plan: PrefillPlan,
        out: torch.Tensor,
    ) -> None: ...


def _reference_supports(spec: MlaAttentionSpec, target: Target) -> str | None:
    return why_unreadable(spec.latent.cache_dtype)


def _aiter_supports(spec: MlaAttentionSpec, target: Target) -> str | None:
    if reason := why_no_aiter(target):
        return reason
    shape = spec.latent
    if shape.dtype != torch.bfloat16:
        return f"aiter's flash attention with keys wider than values is for bfloat16, not for {shape.dtype}."
    if (shape.nope_dim + shape.rope_dim, shape.value_dim) != (192, 128):
        return (
            "aiter's flash attention with keys wider than values is for key size 192 and value size 128, "
            f"not for {shape.nope_dim + shape.rope_dim} and {shape.value_dim}."
        )
    return why_unreadable(shape.cache_dtype)


def _build_aiter(spec: MlaAttentionSpec, target: Target) -> MlaPrefillKernel:
    from atom_core.kernels.mla_prefill.aiter_kernel import AiterMlaPrefill  # imports aiter when it is built

    return AiterMlaPrefill(spec)


def _triton_supports(spec: MlaAttentionSpec, target: Target) -> str | None:
    shape = spec.latent
    if reason := triton_supports(spec, target):
        return reason
    if max(shape.nope_dim, shape.value_dim) > 128:
        return (
            "The Triton kernel has keys (without the rope dimension) and values of sizes up to 128, not "
            f"{shape.nope_dim} and {shape.value_dim}."
        )
    return None


def _build_triton(spec: MlaAttentionSpec, target: Target) -> MlaPrefillKernel:
    from atom_core.kernels.mla_prefill.triton_kernel import TritonMlaPrefill  # needs triton

    return TritonMlaPrefill(spec, nvidia=target.kind == "cuda", overlap=overlaps(target))


MLA_PREFILL: Op[MlaAttentionSpec, MlaPrefillKernel] = Op(
    "mla_prefill",
    (
        Implementation("aiter", _aiter_supports, _build_aiter),
        Implementation("triton", _triton_supports, _build_triton),
        Implementation("reference", _reference_supports, lambda spec, target: ReferenceMlaPrefill(spec)),
    ),
)
