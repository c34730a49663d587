"""Causal attention over latents in any batch: the absorbed form of MLA.

A head's key is its up-projection of the latent. Multiplying the query by that projection instead (an absorbed query)
lets it attend to the latents themselves; the outputs are latents too, which the head's value projection multiplies
afterwards (DeepSeek-V2, arXiv 2405.04434, section 2.1.2). All heads read one row per token: ``c_j`` (its latent) and
``k_j`` (its rotated key):

    s_j = scale * (q_i[:L] . c_j + q_i[L:] . k_j);    o_i = sum_j exp(s_j) c_j / sum_j exp(s_j)

``q``: ``[T, H, L + R]``, any strides with a contiguous last dimension; ``out``: ``[T, H, L]``, written for the batch's
tokens. The causal mask is that of :mod:`atom_core.kernels.attention`. The step's rows are in the cache already.
"""

from __future__ import annotations

from typing import Protocol

import torch

from atom_core.batch import Batch
from atom_core.cache import LatentCacheView
from atom_core.kernels.aiter_library import FP8, why_no_aiter
from atom_core.kernels.cache_dtypes import FP8_DTYPES, is_foreign, why_unreadable
from atom_core.kernels.mla_attention.reference import ReferenceMlaAttention
from atom_core.kernels.mla_attention.spec import MlaAttentionSpec
from atom_core.kernels.select import Implementation, Op, Target
from atom_core.kernels.triton_support import overlaps, why_no_triton, why_no_triton_cache
from atom_core.types import GraphSupport

__all__ = ["MLA_ATTENTION", "MlaAttentionKernel", "MlaAttentionSpec", "build_triton", "triton_supports"]


class MlaAttentionKernel(Protocol):
    """An attention kernel bound to one layer's spec."""

    graph_support: GraphSupport
    padded_heads: int
    """Heads to allocate for a token's queries and outputs, to avoid copies; the kernel may write to those after the
    layer's own."""

    def __call__(self, q: torch.Tensor, cache: LatentCacheView, batch: Batch, out: torch.Tensor) -> None: ...


def _reference_supports(spec: MlaAttentionSpec, target: Target) -> str | None:
    return why_unreadable(spec.latent.cache_dtype)


def triton_supports(spec: MlaAttentionSpec, target: Target) -> str | None:
    """Why Triton cannot run the layer, absorbed or expanded, or None."""
    shape = spec.latent
    if reason := why_no_triton(target):
        return reason
    if shape.rank > 512 or shape.rope_dim > 64:
        return (
            f"The Triton kernel has latents of rank up to 512 and rope dimensions up to 64, not {shape.rank} and "
            f"{shape.rope_dim}."
        )
    if shape.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"The Triton kernel has queries in bfloat16, float16 and float32, not {shape.dtype}."
    return why_no_triton_cache(shape.dtype, shape.cache_dtype, target)


#: Heads of a rank that aiter decodes, and the most tokens of each request; fewer than 16 heads are padded to 16. gfx942
#: has a kernel for 16 heads and treats more heads as more requests, which is right for one token only.
AITER_HEADS = {"gfx942": {16: 4, 64: 1, 128: 1}, "gfx950": {16: 4, 32: 4, 64: 4, 128: 4}}


def _aiter_supports(spec: MlaAttentionSpec, target: Target) -> str | None:
    if reason := why_no_aiter(target):
        return reason
    shape = spec.latent
    if shape.dtype != torch.bfloat16:
        return f"aiter's decode over latents is for bfloat16, not for {shape.dtype}."
    if (shape.rank, shape.rope_dim) != (512, 64):
        return (
            "aiter's decode over latents is for rank 512 and rope dimension 64, not for "
            f"{shape.rank} and {shape.rope_dim}."
        )
    heads = AITER_HEADS[target.arch]
    if shape.cache_dtype in FP8_DTYPES:
        if shape.cache_dtype != FP8[target.arch]:
            return f"aiter's FP8 caches on {target.arch} are {FP8[target.arch]}, not {shape.cache_dtype}."
        heads = {16: heads[16]}
    elif shape.cache_dtype != shape.dtype:
        return f"aiter's decode over latents has a cache in bfloat16 or FP8, not in {shape.cache_dtype}."
    if max(shape.num_heads, 16) not in heads:
        more = "".join(f", or {number}" for number in heads if number > 16)
        return (
            f"aiter's decode over a cache in {shape.cache_dtype} on {target.arch} is used with up to 16 heads on each "
            f"rank{more}, not with {shape.num_heads}."
        )
    return triton_supports(spec, target)  # Triton runs the batches that aiter cannot


def _build_aiter(spec: MlaAttentionSpec, target: Target) -> MlaAttentionKernel:
    from atom_core.kernels.mla_attention.aiter_kernel import AiterMlaAttention  # imports aiter when it is built

    padded_heads = max(spec.latent.num_heads, 16)
    return AiterMlaAttention(spec, padded_heads, AITER_HEADS[target.arch][padded_heads], build_triton(spec, target))


def build_triton(spec: MlaAttentionSpec, target: Target) -> MlaAttentionKernel:
    """The Triton kernel, for specs that :func:`triton_supports`."""
    from atom_core.kernels.mla_attention.triton_kernel import TritonMlaAttention  # needs triton

    foreign = is_foreign(spec.latent.cache_dtype, target.arch)
    nvidia, hopper = target.kind == "cuda", target.is_hopper
    return TritonMlaAttention(spec, nvidia, overlaps(target), foreign, hopper)


MLA_ATTENTION: Op[MlaAttentionSpec, MlaAttentionKernel] = Op(
    "mla_attention",
    (
        Implementation(
            "aiter",
            _aiter_supports,
            _build_aiter,
            lambda target: "It decodes; other batches over latents are Triton's.",
        ),
        Implementation("triton", triton_supports, build_triton),
        Implementation("reference", _reference_supports, lambda spec, target: ReferenceMlaAttention(spec)),
    ),
)
