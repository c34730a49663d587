"""q/k norm, rope and the cache write in Triton, one launch straight from raw qkv.

A program takes some heads of one token. ``T`` tokens, ``H`` query and ``K`` key/value heads of ``D`` numbers, the first
``R`` of them rotated: the partners of a rotation are loaded as two tiles of their own, so that every number is read
once and turned without a shuffle between threads. Padded tokens (negative slots) still get a query, and write nothing
to the cache. Pages are plain, or in the order that aiter's kernels read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from atom_core.cache import SHUFFLED, KVCacheView
from atom_core.kernels.cache_dtypes import saturation_limit
from atom_core.kernels.eviction import EVICT_LAST
from atom_core.kernels.triton_support import launch_options

if TYPE_CHECKING:
    from atom_core.kernels.qk_norm_rope import QkvSpec, QkvWeights

#: Heads a program takes: few where latency counts, more where there are tokens enough to fill a GPU.
_FEW_HEADS, _MANY_HEADS, _MANY_TOKENS = 4, 16, 64


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
    R: tl.constexpr,
    PAIRS: tl.constexpr,
    REST: tl.constexpr,
    HEADS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    NORM: tl.constexpr,
    LIMIT: tl.constexpr,
    TOGETHER: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    is_query = head < H
    is_key = (head >= H) & (head < H + K)
    is_value = (head >= H + K) & (head < H + 2 * K)
    exists = head < H + 2 * K

    # The two halves of what is rotated, partner by partner, and the numbers past it.
    half: tl.constexpr = R // 2
    pair = tl.arange(0, PAIRS)
    paired = pair < half
    first = 2 * pair if INTERLEAVED else pair
    second = first + 1 if INTERLEAVED else pair + half
    row = qkv + token * stride_qkv + head[:, None] * D
    used = exists[:, None] & paired[None, :]
    x = tl.load(row + first[None, :], mask=used, other=0.0)
    y = tl.load(row + second[None, :], mask=used, other=0.0)
    slot = tl.load(slots + token)
    angles = cos_sin + tl.load(positions + token).to(tl.int64) * R
    cos = tl.load(angles + pair, mask=paired, other=1.0)[None, :]
    sin = tl.load(angles + half + pair, mask=paired, other=0.0)[None, :]
    wide_x = x.to(tl.float32)
    wide_y = y.to(tl.float32)
    squares = tl.sum(wide_x * wide_x, 1) + tl.sum(wide_y * wide_y, 1)
    if REST > 0:
        rest = R + tl.arange(0, REST)
        rest_used = exists[:, None] & (rest < D)[None, :]
        z = tl.load(row + rest[None, :], mask=rest_used, other=0.0)
        wide_z = z.to(tl.float32)
        squares += tl.sum(wide_z * wide_z, 1)
    if NORM:
        factor = (1.0 / tl.sqrt(squares / D + eps))[:, None]
        # rounded between norm and rope, as the model defines it
        wide_x = (wide_x * factor * norm_weights(q_norm, k_norm, first, paired, is_query)).to(x.dtype).to(tl.float32)
        wide_y = (wide_y * factor * norm_weights(q_norm, k_norm, second, paired, is_query)).to(x.dtype).to(tl.float32)
        if REST > 0:
            wide_z = (
                (wide_z * factor * norm_weights(q_norm, k_norm, rest, rest < D, is_query)).to(x.dtype).to(tl.float32)
            )
    turned_x = wide_x * cos - wide_y * sin
    turned_y = wide_y * cos + wide_x * sin

    query_at = q_out + (token * H + head[:, None]) * D
    asked = is_query[:, None] & paired[None, :]
    tl.store(query_at + first[None, :], turned_x.to(q_out.dtype.element_ty), mask=asked, eviction_policy=EVICT_LAST)
    tl.store(query_at + second[None, :], turned_y.to(q_out.dtype.element_ty), mask=asked, eviction_policy=EVICT_LAST)

    page = slot // PAGE
    offset = slot % PAGE
    key_at = page * stride_k_page + (head - H).to(tl.int64) * stride_k_head
    value_at = page * stride_v_page + (head - H - K).to(tl.int64) * stride_v_head
    if TOGETHER > 0:
        key_at += offset * TOGETHER
        value_at += offset // TOGETHER * (D * TOGETHER) + offset % TOGETHER
    else:
        key_at += offset * stride_k_token
        value_at += offset * stride_v_token
    first_key, first_value = places(first, PAGE, TOGETHER)
    second_key, second_value = places(second, PAGE, TOGETHER)
    kept = tl.where(slot >= 0, is_key, False)[:, None]
    also = tl.where(slot >= 0, is_value, False)[:, None]
    key_at = key + key_at[:, None]
    value_at = value + value_at[:, None]
    # Keys go through the model's dtype first: what attention would see of an uncached one.
    stored_x = stored(turned_x.to(x.dtype).to(tl.float32), k_scale, LIMIT).to(key.dtype.element_ty)
    stored_y = stored(turned_y.to(x.dtype).to(tl.float32), k_scale, LIMIT).to(key.dtype.element_ty)
    tl.store(key_at + first_key[None, :], stored_x, mask=kept & paired[None, :])
    tl.store(key_at + second_key[None, :], stored_y, mask=kept & paired[None, :])
    plain_x = stored(x.to(tl.float32), v_scale, LIMIT).to(value.dtype.element_ty)
    plain_y = stored(y.to(tl.float32), v_scale, LIMIT).to(value.dtype.element_ty)
    tl.store(value_at + first_value[None, :], plain_x, mask=also & paired[None, :])
    tl.store(value_at + second_value[None, :], plain_y, mask=also & paired[None, :])
    if REST > 0:
        inside = (rest < D)[None, :]
        rest_key, rest_value = places(rest, PAGE, TOGETHER)
        tl.store(
            query_at + rest[None, :],
            wide_z.to(q_out.dtype.element_ty),
            mask=is_query[:, None] & inside,
            eviction_policy=EVICT_LAST,
        )
        stored_z = stored(wide_z.to(x.dtype).to(tl.float32), k_scale, LIMIT).to(key.dtype.element_ty)
        tl.store(key_at + rest_key[None, :], stored_z, mask=kept & inside)
        plain_z = stored(z.to(tl.float32), v_scale, LIMIT).to(value.dtype.element_ty)
        tl.store(value_at + rest_value[None, :], plain_z, mask=also & inside)


@triton.jit
def places(column, PAGE: tl.constexpr, TOGETHER: tl.constexpr):
    """Where numbers of a key and of a value are, from where their token begins; shuffled where some lie together."""
    if TOGETHER > 0:
        return column // TOGETHER * (PAGE * TOGETHER) + column % TOGETHER, column * TOGETHER
    else:  # noqa: RET505 - what stands behind a return would be compiled all the same
        return column, column


@triton.jit
def norm_weights(q_norm, k_norm, columns, used, is_query):
    """For rows that are query heads the query norm's weight, for others the key norm's, in float32."""
    q_weight = tl.load(q_norm + columns, mask=used, other=0.0).to(tl.float32)
    k_weight = tl.load(k_norm + columns, mask=used, other=0.0).to(tl.float32)
    return tl.where(is_query[:, None], q_weight[None, :], k_weight[None, :])


@triton.jit
def stored(x, scale, LIMIT: tl.constexpr):
    """What a cache holds of ``x``, in float32: in FP8, which has a ``LIMIT``, divided by the scale and within it."""
    if LIMIT is not None:
        x = x / scale
        # Comparisons let NaN through, which min and max may not.
        x = tl.where(x > LIMIT, LIMIT, tl.where(x < -LIMIT, -LIMIT, x))
    return x


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
    shuffled = cache.order == SHUFFLED
    assert shuffled or cache.order == "plain", f"there is no way here to write pages in the order {cache.order!r}"
    num_tokens = qkv.shape[0]
    q_out = torch.empty(num_tokens, spec.num_heads, spec.head_dim, dtype=qkv.dtype, device=qkv.device)
    rest = spec.head_dim - spec.rotary_dim
    heads = _FEW_HEADS if num_tokens < _MANY_TOKENS else _MANY_HEADS
    _qk_norm_rope_cache[num_tokens, triton.cdiv(spec.num_heads + 2 * spec.num_kv_heads, heads)](
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
        R=spec.rotary_dim,
        PAIRS=triton.next_power_of_2(spec.rotary_dim // 2),
        REST=triton.next_power_of_2(rest) if rest else 0,
        HEADS=heads,
        INTERLEAVED=spec.interleaved,
        NORM=weights.q_norm is not None,
        LIMIT=saturation_limit(cache.key.dtype),
        TOGETHER=cache.key.shape[-1] if shuffled else 0,
        OVERLAP=overlap,
        # Many programs hide each other's waits: a warp that waits for no other is the fastest then.
        num_warps=4 if heads == _FEW_HEADS else max(1, spec.head_dim // 128),
        **launch_options(overlap),
    )
    return q_out
