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

from atom_core.kernels.cache_dtypes import is_foreign, why_unreadable
from atom_core.kernels.latent_attention.reference import ReferenceLatentAttention
from atom_core.kernels.latent_attention.spec import LatentAttentionSpec
from atom_core.kernels.select import Implementation, Op, Target
from atom_core.kernels.triton_support import overlaps, why_no_triton, why_no_triton_cache
from atom_core.metadata import AttentionMetadata, GraphSupport, LatentCacheView

__all__ = ["LATENT_ATTENTION", "LatentAttentionKernel", "LatentAttentionSpec", "triton_supports"]


class LatentAttentionKernel(Protocol):
    """An attention kernel bound to one layer's spec."""

    graph_support: GraphSupport

    def __call__(
        self, q: torch.Tensor, cache: LatentCacheView, metadata: AttentionMetadata, out: torch.Tensor
    ) -> None: ...


def _reference_supports(spec: LatentAttentionSpec, target: Target) -> str | None:
    return why_unreadable(spec.latent.cache_dtype)


def triton_supports(spec: LatentAttentionSpec, target: Target) -> str | None:
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


def _build_triton(spec: LatentAttentionSpec, target: Target) -> LatentAttentionKernel:
    from atom_core.kernels.latent_attention.triton_kernel import TritonLatentAttention  # needs triton

    foreign = is_foreign(spec.latent.cache_dtype, target.arch)
    return TritonLatentAttention(spec, nvidia=target.kind == "cuda", overlap=overlaps(target), foreign=foreign)


LATENT_ATTENTION: Op[LatentAttentionSpec, LatentAttentionKernel] = Op(
    "latent_attention",
    (
        Implementation("triton", triton_supports, _build_triton),
        Implementation("reference", _reference_supports, lambda spec, target: ReferenceLatentAttention(spec)),
    ),
)
