"""Causal attention of queries that latents are keys and values to, in any batch: the absorbed form of MLA.

A head's key is its matrix times the latent, so its query times that matrix can meet the latent itself, and what it
sums up are latents, of which its value is made afterwards (DeepSeek-V2, arXiv 2405.04434, section 2.1.2). All heads
read one row a token, ``c_j`` (its latent) and ``k_j`` (its rotated key):

    s_j = scale * (q_i[:L] . c_j + q_i[L:] . k_j);    o_i = sum_j exp(s_j) c_j / sum_j exp(s_j)

``q``: ``[T, H, L + R]``, any strides with numbers side by side; ``out``: ``[T, H, L]``, written in the rows of the
batch's tokens. Which keys a query sees: see :mod:`atom_core.kernels.attention`. The step's rows are in the cache.
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
    room: int
    """Heads for which a token's queries and results best have room: where they have, what is behind the layer's own is
    nobody's, and may be written to."""

    def __call__(self, q: torch.Tensor, cache: LatentCacheView, batch: Batch, out: torch.Tensor) -> None: ...


def _reference_supports(spec: MlaAttentionSpec, target: Target) -> str | None:
    return why_unreadable(spec.latent.cache_dtype)


def triton_supports(spec: MlaAttentionSpec, target: Target) -> str | None:
    """Of both forms of attention."""
    shape = spec.latent
    if reason := why_no_triton(target):
        return reason
    if shape.rank > 512 or shape.rope_dim > 64:
        return (
            "The Triton kernel has latents of up to 512 numbers and rotated keys of up to 64, not "
            f"{shape.rank} and {shape.rope_dim}."
        )
    if shape.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"The Triton kernel has queries in bfloat16, float16 and float32, not {shape.dtype}."
    return why_no_triton_cache(shape.dtype, shape.cache_dtype, target)


#: Heads of a rank that aiter decodes, and up to how many tokens of each request at a time; fewer than 16 are decoded as
#: 16. gfx942 has a kernel of 16 heads, and takes more for so many more requests, which holds for one token alone.
AITER_HEADS = {"gfx942": {16: 4, 64: 1, 128: 1}, "gfx950": {16: 4, 32: 4, 64: 4, 128: 4}}


def _aiter_supports(spec: MlaAttentionSpec, target: Target) -> str | None:
    if reason := why_no_aiter(target):
        return reason
    shape = spec.latent
    if shape.dtype != torch.bfloat16:
        return f"aiter's decode over latents is for bfloat16, not for {shape.dtype}."
    if (shape.rank, shape.rope_dim) != (512, 64):
        return (
            "aiter's decode over latents is for latents of 512 numbers and rotated keys of 64, not for "
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
    return triton_supports(spec, target)  # what aiter does not decode is Triton's


def _build_aiter(spec: MlaAttentionSpec, target: Target) -> MlaAttentionKernel:
    from atom_core.kernels.mla_attention.aiter_kernel import AiterMlaAttention  # looked for when it is chosen

    room = max(spec.latent.num_heads, 16)
    return AiterMlaAttention(spec, room, AITER_HEADS[target.arch][room], build_triton(spec, target))


def build_triton(spec: MlaAttentionSpec, target: Target) -> MlaAttentionKernel:
    """The kernel where :func:`triton_supports` has no reason against it."""
    from atom_core.kernels.mla_attention.triton_kernel import TritonMlaAttention  # needs triton

    foreign = is_foreign(spec.latent.cache_dtype, target.arch)
    nvidia, hopper = target.kind == "cuda", (target.kind, target.arch) == ("cuda", "sm90")
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
