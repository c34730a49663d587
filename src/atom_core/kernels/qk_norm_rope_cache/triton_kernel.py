"""q/k norm, rope and the cache write in Triton, one launch straight from raw qkv.

A program takes one head of one token. ``T`` tokens, ``H`` query and ``K`` key/value heads of ``D`` numbers, the first
``R`` of them rotated; a head is loaded twice, the second time with partners exchanged, so that rotation needs no
shuffle between threads. Padded tokens (negative slots) still get a query, and write nothing to the cache.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from atom_core.kernels.cache_dtypes import saturation_limit
from atom_core.kernels.triton_support import launch_options
from atom_core.metadata import KVCacheView

if TYPE_CHECKING:
    from atom_core.kernels.qk_norm_rope import QkvSpec, QkvWeights


@triton.jit
def _saturated(x, LIMIT: tl.constexpr):
    # Comparisons let NaN through, which min and max may not.
    return x if LIMIT is None else tl.where(x > LIMIT, LIMIT, tl.where(x < -LIMIT, -LIMIT, x))


@triton.jit
def _qk_norm_rope_cache(
    qkv,
    positions,
    slots,
    cos_sin,
    q_norm,
    k_norm,
    q_out,
    key,
    value,
    eps,
    k_scale,
    v_scale,
    stride_qkv,
    stride_k_page,
    stride_k_head,
    stride_k_token,
    stride_v_page,
    stride_v_head,
    stride_v_token,
    PAGE: tl.constexpr,
    H: tl.constexpr,
    K: tl.constexpr,
    D: tl.constexpr,
    D_PADDED: tl.constexpr,
    R: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    NORM: tl.constexpr,
    LIMIT: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    dim = tl.arange(0, D_PADDED)
    used = dim < D
    row = qkv + token * stride_qkv + head * D
    x = tl.load(row + dim, mask=used, other=0.0)
    slot = tl.load(slots + token)
    page = slot // PAGE
    offset = slot % PAGE

    if head >= H + K:
        if slot >= 0:
            at = page * stride_v_page + (head - H - K).to(tl.int64) * stride_v_head + offset * stride_v_token + dim
            scaled = _saturated(x.to(tl.float32) / v_scale, LIMIT)
            tl.store(value + at, scaled.to(value.dtype.element_ty), mask=used)
        return

    half: tl.constexpr = R // 2
    turned = dim < R
    if INTERLEAVED:
        partner = tl.where(turned, dim ^ 1, dim)
        pair = dim // 2
        sign = tl.where(dim % 2 == 0, -1.0, 1.0)
    else:
        partner = tl.where(turned, (dim + half) % R, dim)
        pair = dim % half
        sign = tl.where(dim < half, -1.0, 1.0)
    wide = x.to(tl.float32)
    other = tl.load(row + partner, mask=used, other=0.0).to(tl.float32)
    if NORM:
        factor = 1.0 / tl.sqrt(tl.sum(wide * wide, 0) / D + eps)
        weight = q_norm if head < H else k_norm
        # rounded between norm and rope, as the model defines it
        wide = (wide * factor * tl.load(weight + dim, mask=used, other=0.0).to(tl.float32)).to(x.dtype)
        other = (other * factor * tl.load(weight + partner, mask=used, other=0.0).to(tl.float32)).to(x.dtype)
        wide = wide.to(tl.float32)
        other = other.to(tl.float32)
    angles = cos_sin + tl.load(positions + token).to(tl.int64) * R
    cos = tl.load(angles + pair, mask=turned, other=1.0)
    sin = tl.load(angles + half + pair, mask=turned, other=0.0)
    result = tl.where(turned, wide * cos + sign * other * sin, wide)

    if head < H:
        tl.store(q_out + (token * H + head) * D + dim, result.to(q_out.dtype.element_ty), mask=used)
    elif slot >= 0:
        at = page * stride_k_page + (head - H).to(tl.int64) * stride_k_head + offset * stride_k_token + dim
        # through the model's dtype first: what attention would see of an uncached key
        scaled = _saturated(result.to(x.dtype).to(tl.float32) / k_scale, LIMIT)
        tl.store(key + at, scaled.to(key.dtype.element_ty), mask=used)


def qk_norm_rope_cache(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    weights: QkvWeights,
    cache: KVCacheView,
    slots: torch.Tensor,
    *,
    spec: QkvSpec,
    overlap: bool = False,
) -> torch.Tensor:
    """See :mod:`atom_core.kernels.qk_norm_rope_cache`; ``overlap``: see :func:`triton_support.overlaps`."""
    assert qkv.stride(-1) == cache.key.stride(-1) == cache.value.stride(-1) == 1
    num_tokens = qkv.shape[0]
    q_out = torch.empty(num_tokens, spec.num_heads, spec.head_dim, dtype=qkv.dtype, device=qkv.device)
    _qk_norm_rope_cache[(num_tokens, spec.num_heads + 2 * spec.num_kv_heads)](
        qkv,
        positions,
        slots,
        weights.cos_sin,
        weights.q_norm,
        weights.k_norm,
        q_out,
        cache.key,
        cache.value,
        weights.eps,
        cache.k_scale,
        cache.v_scale,
        qkv.stride(0),
        *cache.key.stride()[:3],
        *cache.value.stride()[:3],
        PAGE=cache.page_size,
        H=spec.num_heads,
        K=spec.num_kv_heads,
        D=spec.head_dim,
        D_PADDED=triton.next_power_of_2(spec.head_dim),
        R=spec.rotary_dim,
        INTERLEAVED=spec.interleaved,
        NORM=weights.q_norm is not None,
        LIMIT=saturation_limit(cache.key.dtype),
        OVERLAP=overlap,
        **launch_options(overlap),
    )
    return q_out
