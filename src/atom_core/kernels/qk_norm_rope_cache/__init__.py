"""From raw qkv to queries and a filled cache.

This is :mod:`atom_core.kernels.qk_norm_rope`, followed by writing each token's key and value to its slot. Tokens with a
negative slot write nothing. An FP8 cache stores ``key / k_scale`` and ``value / v_scale``, clamped to its range. The
cache's order must be the one that the attention kernel reads. Result: q ``[T, H, D]``.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch

from atom_core.cache import SHUFFLED, CacheOrder, KVCacheView
from atom_core.kernels.aiter_library import FP8, why_no_aiter
from atom_core.kernels.cache_dtypes import why_unreadable
from atom_core.kernels.qk_norm_rope import QkvSpec, QkvWeights
from atom_core.kernels.qk_norm_rope_cache.cpu import qk_norm_rope_cache as qk_norm_rope_cache_on_cpu
from atom_core.kernels.qk_norm_rope_cache.reference import qk_norm_rope_cache
from atom_core.kernels.rms_norm import FLOAT32_WEIGHT
from atom_core.kernels.select import Implementation, Op, Target, only_on_cpu
from atom_core.kernels.triton_support import overlaps, why_no_triton, why_no_triton_cache


@dataclass(frozen=True)
class QkvCacheSpec:
    """One attention layer's qkv and the cache that it fills."""

    qkv: QkvSpec
    cache_dtype: torch.dtype
    order: CacheOrder


class QkNormRopeCacheKernel(Protocol):
    """The call: ``(qkv, positions [T], weights, cache, slots [T])`` to q."""

    def __call__(
        self,
        qkv: torch.Tensor,
        positions: torch.Tensor,
        weights: QkvWeights,
        cache: KVCacheView,
        slots: torch.Tensor,
    ) -> torch.Tensor: ...


def _aiter_supports(spec: QkvCacheSpec, target: Target) -> str | None:
    if reason := why_no_aiter(target):
        return reason
    qkv = spec.qkv
    if not qkv.qk_norm:
        return "aiter's kernel norms q and k, and this model has no q/k norm."
    if qkv.float32_norms:
        return FLOAT32_WEIGHT
    if qkv.dtype not in (torch.bfloat16, torch.float16):
        return f"aiter's kernel is for bfloat16 and float16, not for {qkv.dtype}."
    if qkv.head_dim not in (64, 128, 256):
        return f"aiter's kernel has head sizes 64, 128 and 256, not {qkv.head_dim}."
    # A thread has a 64th of a head, and the partners of its rotations are in one other thread.
    of_thread = qkv.head_dim // 64
    if qkv.interleaved and of_thread < 2:
        return "aiter's kernel has interleaved rope for head sizes 128 and 256 only."
    if not qkv.interleaved and qkv.rotary_dim // 2 % of_thread:
        return f"aiter's kernel has rotary dimensions in multiples of {2 * of_thread}, not {qkv.rotary_dim}."
    if spec.order not in ("plain", SHUFFLED):
        return f"aiter's kernel writes plain pages and shuffled ones, not {spec.order!r} ones."
    if spec.cache_dtype == qkv.dtype:
        return None
    if spec.cache_dtype != FP8[target.arch] or qkv.head_dim < 128:
        return (
            f"aiter's kernel on {target.arch} fills a cache in the model's dtype {qkv.dtype} or, with head sizes 128 "
            f"and 256, in {FP8[target.arch]}, not in {spec.cache_dtype}."
        )
    return None


def _build_aiter(spec: QkvCacheSpec, target: Target) -> QkNormRopeCacheKernel:
    from atom_core.kernels.qk_norm_rope_cache.aiter_kernel import AiterFillCache  # imports aiter when it is built

    return AiterFillCache(spec)


def _reference_supports(spec: QkvCacheSpec, target: Target) -> str | None:
    if spec.order not in ("plain", SHUFFLED):
        return f"The reference writes plain pages and shuffled ones, not {spec.order!r} ones."
    return why_unreadable(spec.cache_dtype)


def _torch_supports(spec: QkvCacheSpec, target: Target) -> str | None:
    if spec.order != "plain":
        return f"This writes plain pages, not {spec.order!r} ones."
    return only_on_cpu(spec, target) or _reference_supports(spec, target)


def _triton_supports(spec: QkvCacheSpec, target: Target) -> str | None:
    if reason := why_no_triton(target):
        return reason
    if spec.order not in ("plain", SHUFFLED):
        return f"The Triton kernel writes plain pages and shuffled ones, not {spec.order!r} ones."
    return why_no_triton_cache(spec.qkv.dtype, spec.cache_dtype, target)


def _build_triton(spec: QkvCacheSpec, target: Target) -> QkNormRopeCacheKernel:
    from atom_core.kernels.qk_norm_rope_cache.triton_kernel import TritonFillCache  # needs triton, which a CPU may lack

    return TritonFillCache(spec.qkv, overlaps(target))


QK_NORM_ROPE_CACHE: Op[QkvCacheSpec, QkNormRopeCacheKernel] = Op(
    "qk_norm_rope_cache",
    (
        Implementation("aiter", _aiter_supports, _build_aiter),
        Implementation("triton", _triton_supports, _build_triton),
        Implementation(
            "torch", _torch_supports, lambda spec, target: partial(qk_norm_rope_cache_on_cpu, spec=spec.qkv)
        ),
        Implementation(
            "reference", _reference_supports, lambda spec, target: partial(qk_norm_rope_cache, spec=spec.qkv)
        ),
    ),
)
