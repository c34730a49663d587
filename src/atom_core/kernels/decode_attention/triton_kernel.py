"""Decoding attention in Triton, straight from raw qkv: q/k norm, rope, the cache write and attention in one launch.

A program takes one request and all query heads of one key/value head. The new token's key and value never go through
the cache: they open the running softmax (arXiv 2205.14135), as a sink does. What is cached already was written by
earlier steps, so the first tile of it is loaded before the product in front has ended.

Few programs leave most of a GPU idle, so where there are few, several share the keys of a request ("splits"; flash
decoding, https://crfm.stanford.edu/2023/10/12/flashdecoding.html). How many there may be depends on the grid, how many
have work on the length. Each stores its part; the last to arrive adds the parts up, always in the same order.

``R`` requests, ``H`` query heads, ``K`` key/value heads, ``D`` head size up to 256, pages of any size and strides.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl

from atom_core.kernels.attention.splits import SplitBuffers
from atom_core.kernels.attention.triton_kernel import capped
from atom_core.kernels.cache_dtypes import saturation_limit
from atom_core.kernels.qk_norm_rope import QkvWeights
from atom_core.kernels.qk_norm_rope_cache.triton_kernel import norm_weights, stored
from atom_core.kernels.triton_support import launch_options
from atom_core.metadata import AttentionMetadata, KVCacheView

if TYPE_CHECKING:
    from atom_core.kernels.decode_attention import DecodeAttentionSpec


@triton.jit
def _pages(page_table, request, other, known, stride_table, PAGE: tl.constexpr):
    return tl.load(page_table + request * stride_table + other // PAGE, mask=known, other=0).to(tl.int64)


@triton.jit
def _scores(query_xy, query_z, keys_xy, keys_z, scale, soft_cap, REST: tl.constexpr, HAS_CAP: tl.constexpr):
    scores = tl.dot(query_xy, keys_xy.to(query_xy.dtype), input_precision="ieee")
    if REST > 0:
        scores += tl.dot(query_z, keys_z.to(query_z.dtype), input_precision="ieee")
    scores *= scale
    if HAS_CAP:
        scores = capped(scores, soft_cap)
    return scores


@triton.jit
def _seen(scores, other, known, values, highest, total, acc, newest, WINDOW: tl.constexpr):
    """The running softmax after one more tile of keys."""
    seen = known
    if WINDOW > 0:
        seen &= other > newest - WINDOW
    scores = tl.where(seen[None, :], scores, float("-inf"))
    new_highest = tl.maximum(highest, tl.max(scores, 1))
    # No key may have been seen yet: keep exp() away from inf - inf.
    base = tl.where(new_highest == float("-inf"), 0.0, new_highest)
    weights = tl.exp(scores - base[:, None])
    shrink = tl.exp(highest - base)
    total = total * shrink + tl.sum(weights, 1)
    acc = acc * shrink[:, None] + tl.dot(weights.to(values.dtype), values, input_precision="ieee")
    return new_highest, total, acc


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
    parts,
    part_sums,
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
):
    GROUP: tl.constexpr = H // K
    HALF: tl.constexpr = R // 2
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
    request = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1).to(tl.int64)
    split = tl.program_id(2)
    # Loads that need not wait for each other stand before the first branch, behind which they would.
    token = tl.load(query_start_loc + request).to(tl.int64)
    following = tl.load(query_start_loc + request + 1)
    newest = tl.load(seq_lens + request) - 1
    other = tl.arange(0, BLOCK_N)
    FROM_FIRST: tl.constexpr = not SPLIT and WINDOW == 0
    if FROM_FIRST:
        # Past the request's pages the table has room for more: what it says there is looked at by nobody.
        page = _pages(page_table, request, other, other < stride_table * PAGE, stride_table, PAGE)
    if following == token:
        return

    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(newest - WINDOW + 1, 0) // BLOCK_N * BLOCK_N
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

    # Dimensions in the order of the query's tile: the rotated ones, and the rest.
    lane = tl.arange(0, 2 * PAIRS)
    if INTERLEAVED or PAIRS == HALF:
        dim_xy = lane
        used_xy = lane < R
    else:
        dim_xy = lane // PAIRS * HALF + lane % PAIRS
        used_xy = lane % PAIRS < HALF
    rest = R + tl.arange(0, max(REST, 16))
    rest_used = rest < D
    dim = tl.arange(0, D_PADDED)
    dim_used = dim < D
    key += kv_head * stride_k_head
    value += kv_head * stride_v_head

    # The first tile of what is cached is on its way before qkv is there.
    other += begin
    known = other < end
    if not FROM_FIRST:
        page = _pages(page_table, request, other, known, stride_table, PAGE)
    k_at = key + (page * stride_k_page + (other % PAGE).to(tl.int64) * stride_k_token)[None, :]
    v_at = value + (page * stride_v_page + (other % PAGE).to(tl.int64) * stride_v_token)[:, None]
    keys_xy = tl.load(k_at + dim_xy[:, None], mask=used_xy[:, None] & known[None, :], other=0.0)
    keys_z = keys_xy
    if REST > 0:
        keys_z = tl.load(k_at + rest[:, None], mask=rest_used[:, None] & known[None, :], other=0.0)
    values = tl.load(v_at + dim[None, :], mask=known[:, None] & dim_used[None, :], other=0.0)

    pair = tl.arange(0, PAIRS)
    paired = pair < HALF
    first = 2 * pair if INTERLEAVED else pair
    second = first + 1 if INTERLEAVED else pair + HALF
    slot = tl.load(slots + token)
    angles = cos_sin + tl.load(positions + token).to(tl.int64) * R
    cos = tl.load(angles + pair, mask=paired, other=1.0)[None, :]
    sin = tl.load(angles + HALF + pair, mask=paired, other=0.0)[None, :]
    # Rows of the tile: the group's query heads, then the key, of which each program needs its own copy.
    row = tl.arange(0, BLOCK_M)
    is_query = row < GROUP
    head = tl.where(is_query, kv_head * GROUP + row, H + kv_head)
    exists = row <= GROUP
    norm_x = cos
    norm_y = cos
    norm_z = cos
    if NORM:
        norm_x = norm_weights(q_norm, k_norm, first, paired, is_query)
        norm_y = norm_weights(q_norm, k_norm, second, paired, is_query)
        if REST > 0:
            norm_z = norm_weights(q_norm, k_norm, rest, rest_used, is_query)
    sink = tl.full([BLOCK_M], float("-inf"), tl.float32)
    if HAS_SINKS:
        sink = tl.load(sinks + kv_head * GROUP + row, mask=is_query, other=0.0).to(tl.float32)

    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    given = qkv + token * stride_qkv
    at = given + head[:, None] * D
    x = tl.load(at + first[None, :], mask=exists[:, None] & paired[None, :], other=0.0)
    y = tl.load(at + second[None, :], mask=exists[:, None] & paired[None, :], other=0.0)
    new_value = tl.load(given + (H + K + kv_head) * D + dim, mask=dim_used, other=0.0)
    dtype = x.dtype
    x = x.to(tl.float32)
    y = y.to(tl.float32)
    z = x
    if REST > 0:
        z = tl.load(at + rest[None, :], mask=exists[:, None] & rest_used[None, :], other=0.0).to(tl.float32)
    if NORM:
        squares = tl.sum(x * x, 1) + tl.sum(y * y, 1)
        if REST > 0:
            squares += tl.sum(z * z, 1)
        factor = (1.0 / tl.sqrt(squares / D + eps))[:, None]
        # rounded between norm and rope, as the model defines it
        x = (x * factor * norm_x).to(dtype).to(tl.float32)
        y = (y * factor * norm_y).to(dtype).to(tl.float32)
        if REST > 0:
            z = (z * factor * norm_z).to(dtype).to(tl.float32)
    turned = (x * cos - y * sin).to(dtype)
    y = (y * cos + x * sin).to(dtype)
    x = turned
    query_xy = tl.join(x, y)
    if not INTERLEAVED:
        query_xy = tl.permute(query_xy, (0, 2, 1))
    query_xy = tl.reshape(query_xy, (BLOCK_M, 2 * PAIRS))
    query_z = query_xy
    if REST > 0:
        query_z = z.to(dtype)

    # The new key as the cache holds it, once for each row.
    is_key = (row == GROUP)[:, None]
    key_dtype = key.dtype.element_ty
    kept_x = stored(tl.sum(tl.where(is_key, x.to(tl.float32), 0.0), 0), k_scale, LIMIT).to(key_dtype)
    kept_y = stored(tl.sum(tl.where(is_key, y.to(tl.float32), 0.0), 0), k_scale, LIMIT).to(key_dtype)
    products = tl.sum(x.to(tl.float32) * kept_x.to(tl.float32)[None, :], 1)
    products += tl.sum(y.to(tl.float32) * kept_y.to(tl.float32)[None, :], 1)
    kept_value = stored(new_value.to(tl.float32), v_scale, LIMIT).to(value.dtype.element_ty)
    kept_z = kept_x
    if REST > 0:
        kept_z = stored(tl.sum(tl.where(is_key, query_z.to(tl.float32), 0.0), 0), k_scale, LIMIT).to(key_dtype)
        products += tl.sum(query_z.to(tl.float32) * kept_z.to(tl.float32)[None, :], 1)

    highest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, D_PADDED], tl.float32)
    if split == 0:
        # The new key, and the sink, which is one more key of no value, open the running softmax, once.
        score = products * (scale * k_scale)
        if HAS_CAP:
            score = capped(score, soft_cap)
        highest = tl.maximum(score, sink)
        own = tl.exp(score - highest)
        total = own + tl.exp(sink - highest)
        acc = own[:, None] * kept_value.to(tl.float32)[None, :]
        if slot >= 0:
            k_new = key + slot // PAGE * stride_k_page + slot % PAGE * stride_k_token
            v_new = value + slot // PAGE * stride_v_page + slot % PAGE * stride_v_token
            tl.store(k_new + first, kept_x, mask=paired)
            tl.store(k_new + second, kept_y, mask=paired)
            if REST > 0:
                tl.store(k_new + rest, kept_z, mask=rest_used)
            tl.store(v_new + dim, kept_value, mask=dim_used)

    if begin < end:
        scores = _scores(query_xy, query_z, keys_xy, keys_z, scale * k_scale, soft_cap, REST, HAS_CAP)
        highest, total, acc = _seen(scores, other, known, values.to(dtype), highest, total, acc, newest, WINDOW)
    for tile in tl.range(begin + BLOCK_N, end, BLOCK_N, num_stages=STAGES):
        place = tile + tl.arange(0, BLOCK_N)
        cached = place < end
        pages = _pages(page_table, request, place, cached, stride_table, PAGE)
        keys_at = key + (pages * stride_k_page + (place % PAGE).to(tl.int64) * stride_k_token)[None, :]
        values_at = value + (pages * stride_v_page + (place % PAGE).to(tl.int64) * stride_v_token)[:, None]
        more_xy = tl.load(keys_at + dim_xy[:, None], mask=used_xy[:, None] & cached[None, :], other=0.0)
        more_z = more_xy
        if REST > 0:
            more_z = tl.load(keys_at + rest[:, None], mask=rest_used[:, None] & cached[None, :], other=0.0)
        points = _scores(query_xy, query_z, more_xy, more_z, scale * k_scale, soft_cap, REST, HAS_CAP)
        more = tl.load(values_at + dim[None, :], mask=cached[:, None] & dim_used[None, :], other=0.0).to(dtype)
        highest, total, acc = _seen(points, place, cached, more, highest, total, acc, newest, WINDOW)

    if SPLIT:  # noqa: SIM102 - decided when compiling, unlike the next
        if working > 1:
            # Rows of the parts: split, token, head.
            part = (token * K + kv_head) * GROUP + row
            part_rows = tl.cast(num_tokens, tl.int64) * H
            mine = split * part_rows + part
            kept = is_query[:, None] & dim_used[None, :]
            tl.store(parts + mine[:, None] * D + dim[None, :], acc, mask=kept)
            tl.store(part_sums + mine * 2, highest, mask=is_query)
            tl.store(part_sums + mine * 2 + 1, total, mask=is_query)
            tl.debug_barrier()  # all of this program's stores before its arrival is seen
            arrival = arrivals + request * K + kv_head
            if tl.atomic_add(arrival, 1, sem="acq_rel", scope="gpu") != working - 1:
                return
            tl.store(arrival, 0)  # as the next launch wants it
            highest = tl.full([BLOCK_M], float("-inf"), tl.float32)
            total = tl.zeros([BLOCK_M], tl.float32)
            acc = tl.zeros([BLOCK_M, D_PADDED], tl.float32)
            for other_split in range(working):
                part_row = other_split * part_rows + part
                other_highest = tl.load(part_sums + part_row * 2, mask=is_query, other=0.0, cache_modifier=".cg")
                other_total = tl.load(part_sums + part_row * 2 + 1, mask=is_query, other=0.0, cache_modifier=".cg")
                other_acc = tl.load(
                    parts + part_row[:, None] * D + dim[None, :], mask=kept, other=0.0, cache_modifier=".cg"
                )
                new_highest = tl.maximum(highest, other_highest)
                base = tl.where(new_highest == float("-inf"), 0.0, new_highest)
                shrink = tl.exp(highest - base)
                other_shrink = tl.exp(other_highest - base)
                total = total * shrink + other_total * other_shrink
                acc = acc * shrink[:, None] + other_acc * other_shrink[:, None]
                highest = new_highest

    acc = acc * v_scale / tl.where(total == 0.0, 1.0, total)[:, None]
    o_at = out + token * stride_o_token + (kv_head * GROUP + row)[:, None] * stride_o_head + dim[None, :]
    tl.store(o_at, acc.to(out.dtype.element_ty), mask=is_query[:, None] & dim_used[None, :])


class Tile(NamedTuple):
    """What a program takes at once."""

    keys: int
    stages: int
    """Tiles on their way at once."""
    warps: int


class TritonDecodeAttention:
    """See :mod:`atom_core.kernels.decode_attention`.

    Args:
        spec: the layer.
        nvidia: whether the device is one of NVIDIA's; others have less shared memory.
        overlap: see :func:`atom_core.kernels.triton_support.overlaps`.
    """

    def __init__(self, spec: DecodeAttentionSpec, nvidia: bool, overlap: bool) -> None:
        self.spec = spec
        self.nvidia, self.overlap = nvidia, overlap
        group = spec.attention.num_heads // spec.attention.num_kv_heads
        self.rows: int = max(16, triton.next_power_of_2(group + 1))  # tl.dot wants at least 16
        self.split_buffers = SplitBuffers()

    def takes(self, metadata: AttentionMetadata) -> bool:
        """One new token a request. In a graph ``max_query_len`` bounds every batch that it may replay."""
        return metadata.max_query_len == 1

    def tile(self, programs: int) -> Tile:
        """As many keys as keep two tiles of keys and values within the 64 KiB of shared memory of gfx942.

        On NVIDIA the choice is that of an H200 with heads of 128: few programs each wait for memory most of the time
        and take more keys at once, all loaded before they wait for qkv; many get small, so that all of a large batch
        run at the same time.
        """
        spec = self.spec.attention
        halved = (2 if spec.head_dim > 128 else 1) * (2 if spec.dtype == torch.float32 else 1)
        if not self.nvidia:
            return Tile(64 // halved, stages=2, warps=4)
        if programs <= 64:
            return Tile(128 // halved, stages=1, warps=4 if programs <= 32 or halved > 1 else 2)
        if programs <= 128 and halved == 1:
            return Tile(64, stages=1, warps=2)
        if programs <= 512 or halved > 1 or self.rows > 16:
            return Tile(64 // halved, stages=2, warps=4)
        return Tile(16, stages=3, warps=1)

    def __call__(
        self,
        qkv: torch.Tensor,
        positions: torch.Tensor,
        weights: QkvWeights,
        cache: KVCacheView,
        metadata: AttentionMetadata,
        sinks: torch.Tensor | None,
        out: torch.Tensor,
    ) -> None:
        """Write the attention of every request's token to ``out``, and its key and value to the cache."""
        spec, heads = self.spec.attention, self.spec.qkv
        assert qkv.stride(-1) == cache.key.stride(-1) == cache.value.stride(-1) == out.stride(-1) == 1
        num_requests, num_tokens = metadata.seq_lens.shape[0], qkv.shape[0]
        programs, rows = num_requests * spec.num_kv_heads, num_tokens * spec.num_heads
        splits = self.split_buffers.share(programs, metadata.max_seq_len, rows, spec.head_dim, qkv.device)
        tile = self.tile(programs)
        rest = spec.head_dim - heads.rotary_dim
        _decode_attention[num_requests, spec.num_kv_heads, splits.count](
            qkv,
            positions,
            metadata.slot_mapping,
            weights.cos_sin,
            weights.q_norm,
            weights.k_norm,
            cache.key,
            cache.value,
            out,
            sinks,
            splits.parts,
            splits.sums,
            splits.arrivals,
            metadata.query_start_loc,
            metadata.seq_lens,
            metadata.page_table,
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
            metadata.page_table.stride(0),
            PAGE=cache.page_size,
            H=spec.num_heads,
            K=spec.num_kv_heads,
            D=spec.head_dim,
            D_PADDED=max(16, triton.next_power_of_2(spec.head_dim)),
            R=heads.rotary_dim,
            PAIRS=max(8, triton.next_power_of_2(heads.rotary_dim // 2)),
            REST=max(16, triton.next_power_of_2(rest)) if rest else 0,
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
            num_warps=tile.warps,
            **launch_options(self.overlap),
        )
