"""Decode attention in Triton, from raw qkv: q/k norm, rope, the cache write and attention in one launch.

A program takes one request and all query heads of one key/value head. It does not read the new token's key and value
from the cache: they start the running softmax (arXiv 2205.14135), like a sink. Earlier steps wrote the other tokens, so
the program loads the first tile of the cache before the qkv projection has ended.

One cached token may be written in this same launch: a framework that shares pages can hand on a page in the step that
fills it, to a request with one token left (:data:`atom_core.batch.SameStepReads`). Programs of a launch run in any
order, so a program that reads this page first writes the token itself. Only whole pages are shared, so the program
looks for a token of the step that fills one of its request's pages only if its new token starts a page. There is at
most one: a request that writes further on has had this page filled earlier.

If the programs are too few for the GPU, several share the keys of a request (splits, FlashDecoding,
https://crfm.stanford.edu/2023/10/12/flashdecoding.html). The grid limits the number of splits; the length determines
how many have keys. Each stores its partial result, and the last one to finish merges them in a fixed order.

``R`` requests, ``H`` query heads, ``K`` key/value heads, ``D`` head size up to 256, pages of any size and strides.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl

from atom_core.batch import Batch, BatchShape
from atom_core.cache import KVCacheView
from atom_core.kernels.attention.splits import SplitBuffers, count_splits
from atom_core.kernels.attention.triton_kernel import is_last, merged_splits, scaled, wait_for_stores
from atom_core.kernels.attention.triton_parts import LOG2_E
from atom_core.kernels.cache_dtypes import saturation_limit
from atom_core.kernels.decode_attention.hopper import HopperDecodeAttention
from atom_core.kernels.decode_attention.triton_parts import TOKENS, searches, writers
from atom_core.kernels.eviction import EVICT_LAST
from atom_core.kernels.launch import entry_kernel
from atom_core.kernels.qk_norm_rope import QkvWeights
from atom_core.kernels.qk_norm_rope_cache.triton_kernel import stored
from atom_core.kernels.triton_support import launch_options, next_power_of_2, takes_amd_assembly

if TYPE_CHECKING:
    from atom_core.kernels.decode_attention import DecodeAttentionSpec


@triton.jit
def _located(table, tile, known, BLOCK_N: tl.constexpr, PAGE: tl.constexpr):
    """The pages of a tile's tokens and their offsets there; the tile begins at a multiple of its size."""
    lane = tl.arange(0, BLOCK_N).to(tl.uint32)  # unsigned division takes fewer instructions
    if BLOCK_N % PAGE == 0:
        page = tl.load(table + tl.cast(tile, tl.uint32) // PAGE + lane // PAGE, mask=known, other=0)
        within = lane % PAGE
    else:
        token = tl.cast(tile, tl.uint32) + lane
        page = tl.load(table + token // PAGE, mask=known, other=0)
        within = token % PAGE
    return page.to(tl.int64), within.to(tl.int64)


@triton.jit
def _rows(
    page,
    within,
    stride_k_page,
    stride_k_token,
    stride_v_page,
    stride_v_token,
    SAME_STRIDES: tl.constexpr,
):
    """The offsets of the tokens' keys and values."""
    key_row = page * stride_k_page + within * stride_k_token
    value_row = key_row
    if not SAME_STRIDES:
        value_row = page * stride_v_page + within * stride_v_token
    return key_row[:, None], value_row[:, None]


@triton.jit
def _keys(
    key,
    row,
    known,
    first,
    first_used,
    second,
    second_used,
    rest,
    rest_used,
    REST: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    """A tile of keys: first and second of each rotated pair (interleaved: both in one), and the rest."""
    keys_x = tl.load(key + row + first[None, :], mask=known[:, None] & first_used[None, :], other=0.0)
    keys_y = keys_x
    if not INTERLEAVED:
        keys_y = tl.load(key + row + second[None, :], mask=known[:, None] & second_used[None, :], other=0.0)
    keys_z = keys_x
    if REST > 0:
        keys_z = tl.load(key + row + rest[None, :], mask=known[:, None] & rest_used[None, :], other=0.0)
    return keys_x, keys_y, keys_z


@triton.jit
def _normed(x, y, z, norm_x, norm_y, norm_z, eps, AXIS: tl.constexpr, D: tl.constexpr, REST: tl.constexpr):
    """RMS norms of heads along an axis, in the dtype of ``x``."""
    dtype: tl.constexpr = x.dtype
    x = x.to(tl.float32)
    y = y.to(tl.float32)
    squares = tl.sum(x * x + y * y, AXIS, keep_dims=True)
    if REST > 0:
        z = z.to(tl.float32)
        squares += tl.sum(z * z, AXIS, keep_dims=True)
    factor = 1.0 / tl.sqrt(squares / D + eps)
    # The model rounds between norm and rope.
    x = (x * factor * norm_x).to(dtype)
    y = (y * factor * norm_y).to(dtype)
    z = (z * factor * norm_z).to(dtype) if REST > 0 else x
    return x, y, z


@triton.jit
def _rotated(x, y, cos, sin):
    """Rotated pairs."""
    wide_x = x.to(tl.float32)
    wide_y = y.to(tl.float32)
    return (wide_x * cos - wide_y * sin).to(x.dtype), (wide_y * cos + wide_x * sin).to(x.dtype)


@triton.jit
def _cache_entry(
    key_x,
    key_y,
    key_z,
    value,
    k_x,
    k_y,
    k_z,
    cos,
    sin,
    eps,
    k_scale,
    v_scale,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    D: tl.constexpr,
    REST: tl.constexpr,
    NORM: tl.constexpr,
    LIMIT: tl.constexpr,
):
    """A new token's key (first and second of each rotated pair, rest) and value, as the cache stores them."""
    if NORM:
        key_x, key_y, key_z = _normed(key_x, key_y, key_z, k_x, k_y, k_z, eps, 0, D, REST)
    key_x, key_y = _rotated(key_x, key_y, cos, sin)
    cached_x = stored(key_x.to(tl.float32), k_scale, LIMIT).to(KEY)
    cached_y = stored(key_y.to(tl.float32), k_scale, LIMIT).to(KEY)
    cached_z = stored(key_z.to(tl.float32), k_scale, LIMIT).to(KEY) if REST > 0 else cached_x
    return cached_x, cached_y, cached_z, stored(value.to(tl.float32), v_scale, LIMIT).to(VALUE)


@triton.jit
def _store(
    key,
    value,
    slot,
    cached_x,
    cached_y,
    cached_z,
    cached_value,
    first,
    second,
    rest,
    dim,
    paired,
    rest_used,
    dim_used,
    stride_k_page,
    stride_k_token,
    stride_v_page,
    stride_v_token,
    PAGE: tl.constexpr,
    REST: tl.constexpr,
):
    """Write a token's key and value to the cache."""
    k_new = key + slot // PAGE * stride_k_page + slot % PAGE * stride_k_token
    v_new = value + slot // PAGE * stride_v_page + slot % PAGE * stride_v_token
    tl.store(k_new + first, cached_x, mask=paired)
    tl.store(k_new + second, cached_y, mask=paired)
    if REST > 0:
        tl.store(k_new + rest, cached_z, mask=rest_used)
    tl.store(v_new + dim, cached_value, mask=dim_used)


@triton.jit
def _writer(table, slots, positions, num_tokens, newest, begin, end, PAGE: tl.constexpr, READS: tl.constexpr):
    """The step's token that fills a page of a request at a position in ``begin .. end - 1``, or -1."""
    writer = -1
    if searches(newest, PAGE, READS):
        writer = tl.max(writers(tl.arange(0, TOKENS), table, slots, positions, num_tokens, begin, end, PAGE), 0)
    return writer


@triton.jit
def _write(
    given,
    positions,
    slots,
    cos_sin,
    k_norm,
    key,
    value,
    token,
    first,
    second,
    rest,
    dim,
    paired,
    rest_used,
    dim_used,
    eps,
    k_scale,
    v_scale,
    stride_qkv,
    stride_k_page,
    stride_k_token,
    stride_v_page,
    stride_v_token,
    PAGE: tl.constexpr,
    K: tl.constexpr,
    D: tl.constexpr,
    R: tl.constexpr,
    REST: tl.constexpr,
    NORM: tl.constexpr,
    LIMIT: tl.constexpr,
    OVERLAP: tl.constexpr,
    AMD: tl.constexpr,
):
    """Write another request's token to the cache, so that all threads of this program can read it.

    The token's own program writes the same values, up to the rounding of a norm's sum.
    """
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    given += token.to(tl.int64) * stride_qkv
    key_x = tl.load(given + first, mask=paired, other=0.0)
    key_y = tl.load(given + second, mask=paired, other=0.0)
    new_value = tl.load(given + K * D + dim, mask=dim_used, other=0.0)
    angles = cos_sin + tl.load(positions + token).to(tl.int64) * R
    cos = tl.load(angles + tl.arange(0, paired.shape[0]), mask=paired, other=1.0)
    sin = tl.load(angles + R // 2 + tl.arange(0, paired.shape[0]), mask=paired, other=0.0)
    key_z = key_x
    k_x = cos
    k_y = cos
    k_z = cos
    if REST > 0:
        key_z = tl.load(given + rest, mask=rest_used, other=0.0)
    if NORM:
        k_x = tl.load(k_norm + first, mask=paired, other=0.0).to(tl.float32)
        k_y = tl.load(k_norm + second, mask=paired, other=0.0).to(tl.float32)
        if REST > 0:
            k_z = tl.load(k_norm + rest, mask=rest_used, other=0.0).to(tl.float32)
    cached_x, cached_y, cached_z, cached_value = _cache_entry(
        key_x,
        key_y,
        key_z,
        new_value,
        k_x,
        k_y,
        k_z,
        cos,
        sin,
        eps,
        k_scale,
        v_scale,
        key.dtype.element_ty,
        value.dtype.element_ty,
        D,
        REST,
        NORM,
        LIMIT,
    )
    _store(
        key,
        value,
        tl.load(slots + token),
        cached_x,
        cached_y,
        cached_z,
        cached_value,
        first,
        second,
        rest,
        dim,
        paired,
        rest_used,
        dim_used,
        stride_k_page,
        stride_k_token,
        stride_v_page,
        stride_v_token,
        PAGE,
        REST,
    )
    if AMD:
        wait_for_stores()
    tl.debug_barrier()


@triton.jit
def _scores(
    query_x,
    query_y,
    query_z,
    keys_x,
    keys_y,
    keys_z,
    scale,
    soft_cap,
    REST: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HAS_CAP: tl.constexpr,
):
    """Logits to the base 2."""
    dtype: tl.constexpr = query_x.dtype
    scores = tl.dot(query_x, tl.trans(keys_x.to(dtype)), input_precision="ieee")
    if not INTERLEAVED:
        scores = tl.dot(query_y, tl.trans(keys_y.to(dtype)), scores, input_precision="ieee")
    if REST > 0:
        scores = tl.dot(query_z, tl.trans(keys_z.to(dtype)), scores, input_precision="ieee")
    return scaled(scores, scale, soft_cap, HAS_CAP)


@triton.jit
def _seen(scores, known, values, highest, total, acc):
    """The running softmax after one more tile of keys."""
    scores = tl.where(known[None, :], scores, float("-inf"))
    new_highest = tl.maximum(highest, tl.max(scores, 1))
    # A row may have seen no key yet: keep exp2() away from inf - inf.
    base = tl.where(new_highest == float("-inf"), 0.0, new_highest)
    weights = tl.exp2(scores - base[:, None])
    shrink = tl.exp2(highest - base)
    total = total * shrink + tl.sum(weights, 1)
    acc = tl.dot(weights.to(values.dtype), values, acc * shrink[:, None], input_precision="ieee")
    return new_highest, total, acc


@entry_kernel
@triton.jit(do_not_specialize=["num_tokens"])
def _decode_attention(
    qkv,
    positions,
    slots,
    cos_sin,
    q_norm,
    k_norm,
    key,
    value,
    out,
    sinks,
    partials,
    stats,
    arrivals,
    query_start_loc,
    seq_lens,
    page_table,
    num_tokens,
    eps,
    scale,
    k_scale,
    v_scale,
    soft_cap,
    stride_qkv,
    stride_k_page,
    stride_k_head,
    stride_k_token,
    stride_v_page,
    stride_v_head,
    stride_v_token,
    stride_o_token,
    stride_o_head,
    stride_table,
    PAGE: tl.constexpr,
    SAME_STRIDES: tl.constexpr,
    H: tl.constexpr,
    K: tl.constexpr,
    D: tl.constexpr,
    D_PADDED: tl.constexpr,
    R: tl.constexpr,
    PAIRS: tl.constexpr,
    REST: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    NORM: tl.constexpr,
    LIMIT: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    SPLIT: tl.constexpr,
    OVERLAP: tl.constexpr,
    READS: tl.constexpr,
    AMD: tl.constexpr,
):
    GROUP: tl.constexpr = H // K
    HALF: tl.constexpr = R // 2
    KEY: tl.constexpr = key.dtype.element_ty
    VALUE: tl.constexpr = value.dtype.element_ty
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
    request = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1).to(tl.int64)
    split = tl.program_id(2)
    # Independent loads come before the first branch: after it, they would wait for each other.
    token = tl.load(query_start_loc + request).to(tl.int64)
    following = tl.load(query_start_loc + request + 1)
    newest = tl.load(seq_lens + request) - 1
    num_written = 0
    if READS != "never":
        num_written = tl.load(query_start_loc + tl.num_programs(0))  # later tokens are padding
    other = tl.arange(0, BLOCK_N)
    FROM_FIRST: tl.constexpr = not SPLIT and WINDOW == 0
    table = page_table + request * stride_table
    begin = 0
    if FROM_FIRST:
        # Nothing uses the table's entries past the request's pages.
        page, within = _located(table, begin, other < stride_table * PAGE, BLOCK_N, PAGE)
    if following == token:
        # One idle program still waits, so that a wait for this kernel is also a wait for the kernels before it.
        if OVERLAP and request + kv_head + split == 0:
            tl.extra.cuda.gdc_wait()
        return

    earliest = newest + 1 - WINDOW
    if WINDOW > 0:
        begin = tl.maximum(earliest, 0) // BLOCK_N * BLOCK_N
    end = newest
    working = 1
    if SPLIT:
        num_tiles = tl.cdiv(end - begin, BLOCK_N)
        share = tl.maximum(tl.cdiv(num_tiles, tl.num_programs(2)), 1)
        working = tl.maximum(tl.cdiv(num_tiles, share), 1)
        if split >= working:
            return
        begin += split * share * BLOCK_N
        end = tl.minimum(begin + share * BLOCK_N, end)

    # The dimensions of a key: first and second of each rotated pair, in one tile if they are interleaved, and the rest.
    pair = tl.arange(0, PAIRS)
    paired = pair < HALF
    first = 2 * pair if INTERLEAVED else pair
    second = first + 1 if INTERLEAVED else pair + HALF
    key_dim = first
    key_used = paired
    if INTERLEAVED:
        key_dim = tl.arange(0, 2 * PAIRS)
        key_used = key_dim < R
    rest = R + tl.arange(0, max(REST, 16))
    rest_used = rest < D
    dim = tl.arange(0, D_PADDED)
    dim_used = dim < D
    key += kv_head * stride_k_head
    value += kv_head * stride_v_head

    # This search precedes all loads from the cache; on NVIDIA the product before this kernel still runs.
    if READS != "never":
        writer = _writer(table, slots, positions, num_written, newest, begin, end, PAGE, READS)
        if writer >= 0:
            _write(
                qkv + (H + kv_head) * D,
                positions,
                slots,
                cos_sin,
                k_norm,
                key,
                value,
                writer,
                first,
                second,
                rest,
                dim,
                paired,
                rest_used,
                dim_used,
                eps,
                k_scale,
                v_scale,
                stride_qkv,
                stride_k_page,
                stride_k_token,
                stride_v_page,
                stride_v_token,
                PAGE,
                K,
                D,
                R,
                REST,
                NORM,
                LIMIT,
                OVERLAP,
                AMD,
            )

    # The first tile of cached tokens is loaded before qkv is there.
    other += begin
    known = other < end
    if WINDOW > 0:
        known &= other >= earliest
    if not FROM_FIRST:
        page, within = _located(table, begin, known, BLOCK_N, PAGE)
    key_row, value_row = _rows(page, within, stride_k_page, stride_k_token, stride_v_page, stride_v_token, SAME_STRIDES)
    keys_x, keys_y, keys_z = _keys(
        key, key_row, known, key_dim, key_used, second, paired, rest, rest_used, REST, INTERLEAVED
    )
    values = tl.load(value + value_row + dim[None, :], mask=known[:, None] & dim_used[None, :], other=0.0)

    slot = tl.load(slots + token)
    angles = cos_sin + tl.load(positions + token).to(tl.int64) * R
    cos = tl.load(angles + pair, mask=paired, other=1.0)
    sin = tl.load(angles + HALF + pair, mask=paired, other=0.0)
    row = tl.arange(0, BLOCK_M)
    is_query = row < GROUP
    head = (kv_head * GROUP + row)[:, None]
    q_x = cos
    q_y = cos
    q_z = cos
    k_x = cos
    k_y = cos
    k_z = cos
    if NORM:
        q_x = tl.load(q_norm + first, mask=paired, other=0.0).to(tl.float32)
        q_y = tl.load(q_norm + second, mask=paired, other=0.0).to(tl.float32)
        k_x = tl.load(k_norm + first, mask=paired, other=0.0).to(tl.float32)
        k_y = tl.load(k_norm + second, mask=paired, other=0.0).to(tl.float32)
        if REST > 0:
            q_z = tl.load(q_norm + rest, mask=rest_used, other=0.0).to(tl.float32)
            k_z = tl.load(k_norm + rest, mask=rest_used, other=0.0).to(tl.float32)
    sink = tl.full([BLOCK_M], float("-inf"), tl.float32)
    if HAS_SINKS:
        sink = tl.load(sinks + kv_head * GROUP + row, mask=is_query, other=0.0).to(tl.float32) * LOG2_E

    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    given = qkv + token * stride_qkv
    at = given + head * D
    own = given + (H + kv_head) * D
    query_x = tl.load(at + first[None, :], mask=is_query[:, None] & paired[None, :], other=0.0)
    query_y = tl.load(at + second[None, :], mask=is_query[:, None] & paired[None, :], other=0.0)
    key_x = tl.load(own + first, mask=paired, other=0.0)
    key_y = tl.load(own + second, mask=paired, other=0.0)
    new_value = tl.load(own + K * D + dim, mask=dim_used, other=0.0)
    query_z = query_x
    key_z = key_x
    if REST > 0:
        query_z = tl.load(at + rest[None, :], mask=is_query[:, None] & rest_used[None, :], other=0.0)
        key_z = tl.load(own + rest, mask=rest_used, other=0.0)
    if NORM:
        query_x, query_y, query_z = _normed(
            query_x, query_y, query_z, q_x[None, :], q_y[None, :], q_z[None, :], eps, 1, D, REST
        )
    query_x, query_y = _rotated(query_x, query_y, cos[None, :], sin[None, :])

    # The new key and value, as the cache stores them, and the sink (a key without a value) start the running softmax
    # of the first split.
    cached_x, cached_y, cached_z, cached_value = _cache_entry(
        key_x, key_y, key_z, new_value, k_x, k_y, k_z, cos, sin, eps, k_scale, v_scale, KEY, VALUE, D, REST, NORM, LIMIT
    )
    products = query_x.to(tl.float32) * cached_x.to(tl.float32)[None, :]
    products += query_y.to(tl.float32) * cached_y.to(tl.float32)[None, :]
    score = tl.sum(products, 1)
    if REST > 0:
        score += tl.sum(query_z.to(tl.float32) * cached_z.to(tl.float32)[None, :], 1)
    score = scaled(score, scale * k_scale, soft_cap, HAS_CAP)
    highest = tl.maximum(score, sink)
    opened = tl.exp2(score - highest)
    total = opened + tl.exp2(sink - highest)
    if SPLIT:
        highest = tl.where(split == 0, highest, float("-inf"))
        opened = tl.where(split == 0, opened, 0.0)
        total = tl.where(split == 0, total, 0.0)
    acc = opened[:, None] * cached_value.to(tl.float32)[None, :]
    if (slot >= 0) & (split == 0):
        _store(
            key,
            value,
            slot,
            cached_x,
            cached_y,
            cached_z,
            cached_value,
            first,
            second,
            rest,
            dim,
            paired,
            rest_used,
            dim_used,
            stride_k_page,
            stride_k_token,
            stride_v_page,
            stride_v_token,
            PAGE,
            REST,
        )

    if INTERLEAVED:
        query_x = tl.reshape(tl.join(query_x, query_y), (BLOCK_M, 2 * PAIRS))
    if begin < end:
        scores = _scores(
            query_x,
            query_y,
            query_z,
            keys_x,
            keys_y,
            keys_z,
            scale * k_scale,
            soft_cap,
            REST,
            INTERLEAVED,
            HAS_CAP,
        )
        highest, total, acc = _seen(scores, known, values.to(query_x.dtype), highest, total, acc)
    for tile in tl.range(begin + BLOCK_N, end, BLOCK_N, num_stages=STAGES):
        place = tile + tl.arange(0, BLOCK_N)
        cached = place < end
        if WINDOW > 0:
            cached &= place >= earliest
        page, within = _located(table, tile, cached, BLOCK_N, PAGE)
        key_row, value_row = _rows(
            page, within, stride_k_page, stride_k_token, stride_v_page, stride_v_token, SAME_STRIDES
        )
        keys_x, keys_y, keys_z = _keys(
            key, key_row, cached, key_dim, key_used, second, paired, rest, rest_used, REST, INTERLEAVED
        )
        scores = _scores(
            query_x,
            query_y,
            query_z,
            keys_x,
            keys_y,
            keys_z,
            scale * k_scale,
            soft_cap,
            REST,
            INTERLEAVED,
            HAS_CAP,
        )
        values = tl.load(value + value_row + dim[None, :], mask=cached[:, None] & dim_used[None, :], other=0.0)
        highest, total, acc = _seen(scores, cached, values.to(query_x.dtype), highest, total, acc)

    if SPLIT:  # noqa: SIM102 - constexpr, unlike the next
        if working > 1:
            # Rows of partial results: split, token, head.
            query_row = (token * K + kv_head) * GROUP + row
            split_rows = tl.cast(num_tokens, tl.int64) * H
            mine = split * split_rows + query_row
            mask = is_query[:, None] & dim_used[None, :]
            tl.store(partials + mine[:, None] * D + dim[None, :], acc, mask=mask, eviction_policy=EVICT_LAST)
            tl.store(stats + mine * 2, highest, mask=is_query, eviction_policy=EVICT_LAST)
            tl.store(stats + mine * 2 + 1, total, mask=is_query, eviction_policy=EVICT_LAST)
            if not is_last(arrivals + request * K + kv_head, working, AMD):
                return
            total, acc = merged_splits(partials, stats, query_row, split_rows, working, is_query, D, BLOCK_M, D_PADDED)

    acc = acc * v_scale / tl.where(total == 0.0, 1.0, total)[:, None]
    o_at = out + token * stride_o_token + (kv_head * GROUP + row)[:, None] * stride_o_head + dim[None, :]
    tl.store(o_at, acc.to(out.dtype.element_ty), mask=is_query[:, None] & dim_used[None, :], eviction_policy=EVICT_LAST)


class Tile(NamedTuple):
    """The tile of keys of a program."""

    keys: int
    stages: int
    """Tiles that are loaded at the same time."""
    warps: int


class TritonDecodeAttention:
    """See :mod:`atom_core.kernels.decode_attention`.

    Args:
        spec: the layer.
        nvidia: whether the GPU is NVIDIA's; AMD's have less shared memory.
        overlap: see :func:`atom_core.kernels.triton_support.overlaps`.
        hopper: whether the GPU is a Hopper, which has its own kernel.
    """

    def __init__(self, spec: DecodeAttentionSpec, nvidia: bool, overlap: bool, hopper: bool = False) -> None:
        self.spec = spec
        own = hopper and HopperDecodeAttention.fits(spec)
        self.hopper = HopperDecodeAttention(spec, overlap) if own else None
        self.nvidia, self.overlap = nvidia, overlap
        #: Query heads that share a key.
        self.group = spec.attention.num_heads // spec.attention.num_kv_heads
        self.rows: int = max(16, next_power_of_2(self.group))  # tl.dot wants at least 16
        self.split_buffers = SplitBuffers()

    def takes(self, batch: Batch | BatchShape) -> bool:
        """Whether requests have one new token. A graph's ``max_query_len`` bounds every batch that it can replay."""
        return batch.max_query_len == 1

    def attention_compile_keys(self, shape: BatchShape, device: torch.device) -> Iterator[Hashable]:
        """See :class:`atom_core.kernels.compile_keys.AttentionCompileKeys`."""
        if self.hopper is not None:
            yield from self.hopper.attention_compile_keys(shape, device)
        programs = shape.num_requests * self.spec.attention.num_kv_heads
        yield self.tile(programs), count_splits(programs, shape.max_seq_len, device) > 1

    def tile(self, programs: int) -> Tile:
        """The tile for a number of programs. On AMD two tiles of keys and values fit in gfx942's 64 KiB of LDS.

        On NVIDIA these are the fastest tiles in a layer of head size 128 on an H200. Few programs wait for memory most
        of the time, so they take more keys, all loaded before they wait for qkv. Many programs have one warp each, so
        their softmax needs no exchange, or two if eight heads or more share a key.
        """
        spec = self.spec.attention
        halved = (2 if spec.head_dim > 128 else 1) * (2 if spec.dtype == torch.float32 else 1)
        if not self.nvidia:
            return Tile(64 // halved, stages=2, warps=4)
        if programs <= 64:
            return Tile(128 // halved if programs <= 32 else 64 // halved, stages=1, warps=4)
        if programs <= 128 or halved > 1 or self.rows > 16:
            return Tile(64 // halved, stages=2, warps=4)
        if programs <= 256 and self.group >= 8:
            return Tile(64, stages=3, warps=2)
        return Tile(32, stages=3 if programs <= 512 else 2, warps=1)

    def __call__(
        self,
        qkv: torch.Tensor,
        positions: torch.Tensor,
        weights: QkvWeights,
        cache: KVCacheView,
        batch: Batch,
        sinks: torch.Tensor | None,
        out: torch.Tensor,
    ) -> None:
        """Write the attention of every request's token to ``out``, and its key and value to the cache."""
        spec, heads = self.spec.attention, self.spec.qkv
        assert qkv.stride(-1) == cache.key.stride(-1) == cache.value.stride(-1) == out.stride(-1) == 1
        if self.hopper is not None and self.hopper.takes(cache):
            self.hopper(qkv, positions, weights, cache, batch, sinks, out)
            return
        num_requests, num_tokens = batch.seq_lens.shape[0], qkv.shape[0]
        programs, rows = num_requests * spec.num_kv_heads, num_tokens * spec.num_heads
        splits = self.split_buffers.share(programs, batch.max_seq_len, rows, spec.head_dim, qkv.device)
        tile = self.tile(programs)
        rest = spec.head_dim - heads.rotary_dim
        _decode_attention[num_requests, spec.num_kv_heads, splits.count](
            qkv,
            positions,
            batch.pages.slots,
            weights.cos_sin,
            weights.q_norm,
            weights.k_norm,
            cache.key,
            cache.value,
            out,
            sinks,
            splits.partials,
            splits.stats,
            splits.arrivals,
            batch.query_start_loc,
            batch.seq_lens,
            batch.pages.table,
            num_tokens,
            weights.eps,
            spec.scale,
            cache.k_scale,
            cache.v_scale,
            spec.soft_cap or 0.0,
            qkv.stride(0),
            *cache.key.stride()[:3],
            *cache.value.stride()[:3],
            *out.stride()[:2],
            batch.pages.table.stride(0),
            PAGE=cache.page_size,
            SAME_STRIDES=cache.key.stride() == cache.value.stride(),
            H=spec.num_heads,
            K=spec.num_kv_heads,
            D=spec.head_dim,
            D_PADDED=max(16, next_power_of_2(spec.head_dim)),
            R=heads.rotary_dim,
            PAIRS=max(16, next_power_of_2(heads.rotary_dim // 2)),  # tl.dot wants at least 16
            REST=max(16, next_power_of_2(rest)) if rest else 0,
            BLOCK_M=self.rows,
            BLOCK_N=tile.keys,
            STAGES=tile.stages,
            INTERLEAVED=heads.interleaved,
            NORM=weights.q_norm is not None,
            LIMIT=saturation_limit(cache.key.dtype),
            WINDOW=spec.window or 0,
            HAS_CAP=bool(spec.soft_cap),
            HAS_SINKS=sinks is not None,
            SPLIT=splits.count > 1,
            OVERLAP=self.overlap,
            READS=self.spec.reads,
            AMD=takes_amd_assembly(self.nvidia),
            num_warps=tile.warps,
            **launch_options(self.overlap),
        )
