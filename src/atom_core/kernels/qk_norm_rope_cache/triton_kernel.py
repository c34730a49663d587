"""q/k norm, rope and the cache write in Triton: one launch from raw qkv.

A program takes some heads of one token. ``T`` tokens, ``H`` query and ``K`` key/value heads of size ``D``, with ``R``
rotated elements first. The two elements of a rotated pair are loaded as two tiles, so each element is read once, and no
thread needs another's. Padded tokens (negative slots) get a query, and write nothing to the cache. Pages are plain, or
in the order that aiter's kernels read.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from atom_core.batch import BatchShape
from atom_core.cache import SHUFFLED, KVCacheView
from atom_core.kernels.cache_dtypes import saturation_limit
from atom_core.kernels.eviction import EVICT_LAST
from atom_core.kernels.launch import entry_kernel
from atom_core.kernels.triton_support import cdiv, launch_options, next_power_of_2

if TYPE_CHECKING:
    from atom_core.kernels.qk_norm_rope import QkvSpec, QkvWeights

#: Heads of a program: few for latency, more if the tokens fill a GPU.
_FEW_HEADS, _MANY_HEADS, _MANY_TOKENS = 4, 16, 64


@entry_kernel
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

    # The first and second elements of the rotated pairs; ``rest`` are the elements after them.
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
        # The model rounds between norm and rope.
        wide_x = (wide_x * factor * norm_weights(q_norm, k_norm, first, paired, is_query)).to(x.dtype).to(tl.float32)
        wide_y = (wide_y * factor * norm_weights(q_norm, k_norm, second, paired, is_query)).to(x.dtype).to(tl.float32)
        if REST > 0:
            wide_z = (
                (wide_z * factor * norm_weights(q_norm, k_norm, rest, rest < D, is_query)).to(x.dtype).to(tl.float32)
            )
    rotated_x = wide_x * cos - wide_y * sin
    rotated_y = wide_y * cos + wide_x * sin

    query_at = q_out + (token * H + head[:, None]) * D
    asked = is_query[:, None] & paired[None, :]
    tl.store(query_at + first[None, :], rotated_x.to(q_out.dtype.element_ty), mask=asked, eviction_policy=EVICT_LAST)
    tl.store(query_at + second[None, :], rotated_y.to(q_out.dtype.element_ty), mask=asked, eviction_policy=EVICT_LAST)

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
    writes_key = tl.where(slot >= 0, is_key, False)[:, None]
    writes_value = tl.where(slot >= 0, is_value, False)[:, None]
    key_at = key + key_at[:, None]
    value_at = value + value_at[:, None]
    # Keys are rounded to the model's dtype first, as attention without a cache would see them.
    stored_x = stored(rotated_x.to(x.dtype).to(tl.float32), k_scale, LIMIT).to(key.dtype.element_ty)
    stored_y = stored(rotated_y.to(x.dtype).to(tl.float32), k_scale, LIMIT).to(key.dtype.element_ty)
    tl.store(key_at + first_key[None, :], stored_x, mask=writes_key & paired[None, :])
    tl.store(key_at + second_key[None, :], stored_y, mask=writes_key & paired[None, :])
    plain_x = stored(x.to(tl.float32), v_scale, LIMIT).to(value.dtype.element_ty)
    plain_y = stored(y.to(tl.float32), v_scale, LIMIT).to(value.dtype.element_ty)
    tl.store(value_at + first_value[None, :], plain_x, mask=writes_value & paired[None, :])
    tl.store(value_at + second_value[None, :], plain_y, mask=writes_value & paired[None, :])
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
        tl.store(key_at + rest_key[None, :], stored_z, mask=writes_key & inside)
        plain_z = stored(z.to(tl.float32), v_scale, LIMIT).to(value.dtype.element_ty)
        tl.store(value_at + rest_value[None, :], plain_z, mask=writes_value & inside)


@triton.jit
def places(column, PAGE: tl.constexpr, TOGETHER: tl.constexpr):
    """Offsets of a key's and a value's elements from their token's; in shuffled pages if ``TOGETHER > 0``."""
    if TOGETHER > 0:
        return column // TOGETHER * (PAGE * TOGETHER) + column % TOGETHER, column * TOGETHER
    else:  # noqa: RET505 - Triton compiles code after a return
        return column, column


@triton.jit
def norm_weights(q_norm, k_norm, columns, used, is_query):
    """The query norm's weight for query heads, the key norm's for the others, in float32."""
    q_weight = tl.load(q_norm + columns, mask=used, other=0.0).to(tl.float32)
    k_weight = tl.load(k_norm + columns, mask=used, other=0.0).to(tl.float32)
    return tl.where(is_query[:, None], q_weight[None, :], k_weight[None, :])


@triton.jit
def stored(x, scale, LIMIT: tl.constexpr):
    """What a cache stores of ``x``, in float32: for FP8, which has a ``LIMIT``, divided by the scale and clamped."""
    if LIMIT is not None:
        x = x / scale
        # Comparisons keep NaN; min and max may not.
        x = tl.where(x > LIMIT, LIMIT, tl.where(x < -LIMIT, -LIMIT, x))
    return x


class TritonFillCache:
    """See :mod:`atom_core.kernels.qk_norm_rope_cache`; ``overlap``: see :func:`triton_support.overlaps`."""

    def __init__(self, spec: QkvSpec, overlap: bool) -> None:
        self.spec, self.overlap = spec, overlap

    def attention_compile_keys(self, shape: BatchShape, device: torch.device) -> Iterator[Hashable]:
        """See :class:`atom_core.kernels.compile_keys.AttentionCompileKeys`."""
        yield _heads(shape.num_tokens)

    def __call__(
        self,
        qkv: torch.Tensor,
        positions: torch.Tensor,
        weights: QkvWeights,
        cache: KVCacheView,
        slots: torch.Tensor,
    ) -> torch.Tensor:
        """The rotated queries; keys and values are in the cache."""
        return qk_norm_rope_cache(qkv, positions, weights, cache, slots, spec=self.spec, overlap=self.overlap)


def _heads(num_tokens: int) -> int:
    """Heads of a program."""
    return _FEW_HEADS if num_tokens < _MANY_TOKENS else _MANY_HEADS


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
    assert shuffled or cache.order == "plain", f"no kernel writes pages in the order {cache.order!r}"
    num_tokens = qkv.shape[0]
    q_out = torch.empty(num_tokens, spec.num_heads, spec.head_dim, dtype=qkv.dtype, device=qkv.device)
    rest = spec.head_dim - spec.rotary_dim
    heads = _heads(num_tokens)
    _qk_norm_rope_cache[num_tokens, cdiv(spec.num_heads + 2 * spec.num_kv_heads, heads)](
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
        PAIRS=next_power_of_2(spec.rotary_dim // 2),
        REST=next_power_of_2(rest) if rest else 0,
        HEADS=heads,
        INTERLEAVED=spec.interleaved,
        NORM=weights.q_norm is not None,
        LIMIT=saturation_limit(cache.key.dtype),
        TOGETHER=cache.key.shape[-1] if shuffled else 0,
        OVERLAP=overlap,
        # Many programs hide each other's waits; programs of one warp, which has no other to wait for, are fastest then.
        num_warps=4 if heads == _FEW_HEADS else max(1, spec.head_dim // 128),
        **launch_options(overlap),
    )
    return q_out
