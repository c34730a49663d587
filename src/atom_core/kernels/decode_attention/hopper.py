"""Decode attention on Hopper, in Gluon: as :mod:`.triton_kernel`, but tensor cores read tiles from shared memory.

The 64 rows of a ``wgmma`` are keys for the scores, and elements of a head for the outputs; the query heads of a group,
padded to eight or more, are its columns. So neither keys nor values move through registers, and a program copies
several tiles ahead of the one that it works on: nearly all of its time is the memory's.

The first tiles are copied before the qkv projection has ended. The new token's key and value start the running softmax
from registers; so does the sink.

Tiles of an FP8 cache are widened in registers, and are the products' left side from there: see
:mod:`atom_core.kernels.attention.hopper_bytes`, whose words of two elements are the columns of tiles here.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import TYPE_CHECKING, NamedTuple

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from atom_core.batch import Batch, BatchShape
from atom_core.cache import KVCacheView
from atom_core.kernels.attention.hopper_bytes import elements
from atom_core.kernels.attention.hopper_parts import (
    aligned,
    copied_layout,
    copy_tile,
    pages_of_runs,
    partners,
    run_of,
    runs_layout,
    scaled,
    to_base_2,
)
from atom_core.kernels.attention.splits import MAX_SPLITS, SplitBuffers, count_splits
from atom_core.kernels.attention.triton_parts import LOG2_E
from atom_core.kernels.cache_dtypes import saturation_limit
from atom_core.kernels.decode_attention.triton_parts import TOKENS, searches, writers
from atom_core.kernels.eviction import EVICT_LAST
from atom_core.kernels.launch import entry_kernel
from atom_core.kernels.linear.few_rows_hopper import barrier, depend, ready
from atom_core.kernels.linear.tiles import why_no_gluon
from atom_core.kernels.qk_norm_rope import QkvWeights
from atom_core.kernels.qk_norm_rope_cache.triton_kernel import stored
from atom_core.kernels.triton_support import launch_options, multiprocessors, next_power_of_2

if TYPE_CHECKING:
    from atom_core.kernels.attention import PagedAttentionSpec
    from atom_core.kernels.decode_attention import DecodeAttentionSpec

#: The fewest columns of ``wgmma``, and the most query heads of a group: their outputs fill registers.
_COLUMNS, _MAX_COLUMNS = 8, 64
#: Shared memory of a multiprocessor, and what of it each program takes beside its own.
_SHARED, _RESERVED = 228 * 1024, 1024
#: The fewest keys of a split where splits run in turns: merging them takes the time of a few tiles.
_MIN_KEYS = 256
#: Dtypes of a cache whose elements are half as wide as the layer's.
_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)

_searches = gluon.jit(searches.fn)
_writers = gluon.jit(writers.fn)
_stored = gluon.jit(stored.fn)


@gluon.jit
def _issued():
    """True, which ptxas knows only behind a barrier: what depends on it comes after all loads before the barrier.

    For fewer registers, ptxas has loads wait for the results of others.
    """
    count = gl.inline_asm_elementwise(
        "{ .reg .pred never; setp.ne.u32 never, 0, 0; bar.red.popc.u32 $0, 0, never; }",
        "=r",
        [],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )
    return count == 0


@gluon.jit
def _writer(table, slots, positions, num_tokens, newest, begin, end, PAGE: gl.constexpr, READS: gl.constexpr):
    """As that of :mod:`.triton_kernel`."""
    writer = newest * 0 - 1
    if _searches(newest, PAGE, READS):
        lane = gl.arange(0, TOKENS, gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
        writer = gl.max(_writers(lane, table, slots, positions, num_tokens, begin, end, PAGE), 0)
    return writer


@gluon.jit
def _angles(cos_sin, position, pair, is_first, rotated, R: gl.constexpr):
    """A position's cosines, and sines with the sign with which an element's partner is added to it."""
    at = cos_sin + position.to(gl.int64) * R + pair
    cos = gl.load(at, mask=rotated, other=1.0)
    sin = gl.load(at + R // 2, mask=rotated, other=0.0)
    return cos, gl.where(is_first, -sin, sin)


@gluon.jit
def _norm_factor(squares, eps, D: gl.constexpr):
    """What elements of a head are multiplied by, from the sum of their squares."""
    return 1.0 / gl.sqrt(squares / D + eps)


@gluon.jit
def _rotated(x, y, factor, weight, partner_weight, cos, sin, dtype: gl.constexpr, NORM: gl.constexpr):
    """Elements ``x`` with partners ``y``, float32, normed and rotated. The model rounds between norm and rope."""
    if NORM:
        x = (x * factor * weight).to(dtype).to(gl.float32)
        y = (y * factor * partner_weight).to(dtype).to(gl.float32)
    return (x * cos + y * sin).to(dtype)


@gluon.jit
def _norm_weights(norm, dim, partner, rotated):
    """A norm's weights of elements and of their partners; without a norm anything."""
    weight = dim
    partner_weight = dim
    if norm is not None:
        weight = gl.load(norm + dim).to(gl.float32)
        partner_weight = gl.load(norm + partner, mask=rotated, other=0.0).to(gl.float32)
    return weight, partner_weight


@gluon.jit
def _in_cache(x, side, scale, LIMIT: gl.constexpr):
    """Elements as the cache stores them."""
    dtype: gl.constexpr = side.dtype.element_ty
    return x if LIMIT is None else _stored(x.to(gl.float32), scale, LIMIT).to(dtype)


@gluon.jit
def _key(
    x, y, weight, partner_weight, cos, sin, eps, key, scale, dtype: gl.constexpr, NORM: gl.constexpr,
    LIMIT: gl.constexpr,
):  # fmt: skip
    """A token's key as the cache stores it, from its elements and their partners."""
    factor = _norm_factor(gl.sum(x * x, 0), eps, x.shape[0])
    return _in_cache(_rotated(x, y, factor, weight, partner_weight, cos, sin, dtype, NORM), key, scale, LIMIT)


@gluon.jit
def _loaded(source, dim, partner, rotated):
    """Elements of a head, and their partners."""
    return gl.load(source + dim).to(gl.float32), gl.load(source + partner, mask=rotated, other=0.0).to(gl.float32)


@gluon.jit
def _store(
    key,
    value,
    slot,
    dim,
    new_key,
    new_value,
    stride_k_page,
    stride_k_token,
    stride_v_page,
    stride_v_token,
    PAGE: gl.constexpr,
):
    """Write a token's key and value to the cache."""
    slot = slot.to(gl.int64)
    gl.store(key + slot // PAGE * stride_k_page + slot % PAGE * stride_k_token + dim, new_key)
    gl.store(value + slot // PAGE * stride_v_page + slot % PAGE * stride_v_token + dim, new_value)


@gluon.jit
def _heads(acc, second_acc, FP8: gl.constexpr):
    """``[COLUMNS, D]``: each head's sums, of words' first elements and of their second ones."""
    if FP8:
        both = gl.join(acc, second_acc).permute((1, 0, 2))
        result = both.reshape([both.shape[0], 2 * both.shape[1]])
    else:
        result = acc.permute((1, 0))
    return result


@gluon.jit
def _merge(
    partials,
    stats,
    out,
    first_row,
    split_rows,
    working,
    stride_o_head,
    GROUP: gl.constexpr,
    COLUMNS: gl.constexpr,
    D: gl.constexpr,
):
    """Merge the splits of a group's heads, whose partial results begin at ``first_row``, and write them to ``out``."""
    warps: gl.constexpr = gl.num_warps()
    # So many splits are loaded at a time as fill half of the registers.
    block: gl.constexpr = min(D, warps * 2048 // COLUMNS)
    S: gl.constexpr = min(16, warps * 2048 // (COLUMNS * block))
    lanes: gl.constexpr = min(32, block // 4)
    loaded: gl.constexpr = gl.BlockedLayout([S, 1, 4], [1, 32 // lanes, lanes], [1, warps, 1], [2, 1, 0])
    of_stats: gl.constexpr = gl.SliceLayout(2, loaded)
    merged: gl.constexpr = gl.SliceLayout(0, loaded)
    of_merged: gl.constexpr = gl.SliceLayout(1, merged)
    lane = gl.arange(0, S, gl.SliceLayout(1, of_stats))[:, None]
    row = gl.arange(0, COLUMNS, gl.SliceLayout(0, of_stats))[None, :]
    head = gl.arange(0, COLUMNS, of_merged)
    for first in gl.static_range(0, D, block):
        column = first + gl.arange(0, block, gl.SliceLayout(0, gl.SliceLayout(1, loaded)))
        highest = gl.full([COLUMNS], float("-inf"), gl.float32, gl.SliceLayout(0, of_stats))
        total = gl.zeros([COLUMNS], gl.float32, gl.SliceLayout(0, of_stats))
        acc = gl.zeros([COLUMNS, block], gl.float32, merged)
        for split in range(0, working, S):
            there = (split + lane < working) & (row < GROUP)
            mine = (split + lane) * split_rows + first_row + row
            split_highest = gl.load(stats + mine * 2, mask=there, other=float("-inf"), cache_modifier=".cg")
            split_total = gl.load(stats + mine * 2 + 1, mask=there, other=0.0, cache_modifier=".cg")
            source = (partials + mine * D)[:, :, None] + column[None, None, :]
            sums = gl.load(source, mask=there[:, :, None], other=0.0, cache_modifier=".cg")
            # The new token is of the first split, so the maximum of a row in use is finite.
            new_highest = gl.maximum(highest, gl.max(split_highest, 0))
            shrink = gl.exp2(highest - new_highest)
            factors = gl.exp2(split_highest - new_highest[None, :])
            total = total * shrink + gl.sum(split_total * factors, 0)
            acc = acc * gl.convert_layout(shrink, of_merged)[:, None] + gl.sum(sums * factors[:, :, None], 0)
            highest = new_highest
        acc = acc / gl.convert_layout(total, of_merged)[:, None]
        to = (out + head * stride_o_head)[:, None] + (first + gl.arange(0, block, gl.SliceLayout(0, merged)))[None, :]
        gl.store(to, acc.to(out.dtype.element_ty), mask=(head < GROUP)[:, None], eviction_policy=EVICT_LAST)


@entry_kernel
@gluon.jit(do_not_specialize=["num_tokens"])
def decode_attention_hopper(
    qkv,
    positions,
    slots,
    cos_sin,
    q_norm,
    k_norm,
    key,
    value,
    key_words,
    value_words,
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
    PAGE: gl.constexpr,
    H: gl.constexpr,
    K: gl.constexpr,
    D: gl.constexpr,
    R: gl.constexpr,
    COLUMNS: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BUFFERS: gl.constexpr,
    INTERLEAVED: gl.constexpr,
    WINDOW: gl.constexpr,
    HAS_CAP: gl.constexpr,
    SPLIT: gl.constexpr,
    MIN_TILES: gl.constexpr,
    READS: gl.constexpr,
    LIMIT: gl.constexpr,
    OVERLAP: gl.constexpr,
):
    """A request, a key/value head and a split. ``scale`` and ``soft_cap`` are for logits to the base 2.

    ``key_words`` and ``value_words``: the cache as tiles are copied from it, FP8 in words of two elements. ``scale``
    includes the keys' scale, as the new token's key too is what the cache stores.
    """
    if OVERLAP:
        depend("griddepcontrol.launch_dependents; // $0")
    GROUP: gl.constexpr = H // K
    NORM: gl.constexpr = q_norm is not None
    FROM_FIRST: gl.constexpr = not SPLIT and WINDOW == 0
    FP8: gl.constexpr = LIMIT is not None
    cached: gl.constexpr = key.dtype.element_ty
    dtype: gl.constexpr = qkv.dtype.element_ty
    word: gl.constexpr = key_words.dtype.element_ty
    # Words of a row, and elements of a word.
    EACH: gl.constexpr = 2 if FP8 else 1
    W: gl.constexpr = D // EACH
    warps: gl.constexpr = gl.num_warps()
    copied: gl.constexpr = copied_layout(W, warps)
    RUN: gl.constexpr = run_of(PAGE, BLOCK_N, W, warps)
    # Of an even number of buffers, half are for keys and half for values; an odd number serves both in turns.
    # In an iteration, two copies begin: one while keys are multiplied, of the tile FIRST_AHEAD tiles ahead, which is of
    # values (of keys where they take turns), and one while values are multiplied, of the other kind.
    APART: gl.constexpr = BUFFERS % 2 == 0
    RING: gl.constexpr = BUFFERS // 2 if APART else BUFFERS
    FIRST_AHEAD: gl.constexpr = (BUFFERS - 1) // 2
    SECOND_AHEAD: gl.constexpr = BUFFERS // 2
    runs: gl.constexpr = runs_layout(RUN, W, warps)
    of_head: gl.constexpr = copied_layout(D, warps)
    of_row: gl.constexpr = gl.SliceLayout(1, of_head)
    of_dim: gl.constexpr = gl.SliceLayout(0, of_head)
    scored: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, COLUMNS, 16])
    of_scores: gl.constexpr = gl.SliceLayout(0, scored)
    of_keys: gl.constexpr = gl.DotOperandLayout(0, scored, 2)
    summed: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, COLUMNS, 16])
    of_sums: gl.constexpr = gl.SliceLayout(0, summed)
    of_values: gl.constexpr = gl.DotOperandLayout(0, summed, 2)

    request = gl.program_id(0)
    kv_head = gl.program_id(1)
    split = gl.program_id(2)
    # Independent loads come before the first branch: after it, they would wait for each other.
    token = gl.load(query_start_loc + request)
    following = gl.load(query_start_loc + request + 1)
    newest = gl.load(seq_lens + request) - 1
    num_written = newest * 0
    if READS != "never":
        num_written = gl.load(query_start_loc + gl.num_programs(0))  # later tokens are padding
    table = page_table + request.to(gl.int64) * stride_table
    begin = newest * 0
    pages = ()
    if FROM_FIRST:
        # Nothing uses the table's entries past the request's pages.
        for index in gl.static_range(SECOND_AHEAD + 1):
            pages += (pages_of_runs(table, index * BLOCK_N, stride_table * PAGE, BLOCK_N, PAGE, RUN, runs),)  # type: ignore[assignment]
    if following == token:
        # One idle program still waits, so that a wait for this kernel is also a wait for the kernels before it.
        if OVERLAP and request + kv_head + split == 0:
            depend("griddepcontrol.wait; // $0")
        return

    earliest = newest + 1 - WINDOW
    if WINDOW > 0:
        begin = gl.maximum(earliest, 0) // BLOCK_N * BLOCK_N
    end = newest
    working = newest * 0 + 1
    if SPLIT:
        num_tiles = gl.cdiv(end - begin, BLOCK_N)
        share = gl.maximum(gl.cdiv(num_tiles, gl.num_programs(2)), MIN_TILES)
        working = gl.maximum(gl.cdiv(num_tiles, share), 1)
        if split >= working:
            return
        begin += split * share * BLOCK_N
        end = gl.minimum(begin + share * BLOCK_N, end)
    if not FROM_FIRST:
        for index in gl.static_range(SECOND_AHEAD + 1):
            pages += (pages_of_runs(table, begin + index * BLOCK_N, end, BLOCK_N, PAGE, RUN, runs),)  # type: ignore[assignment]
    slot = gl.load(slots + token)
    position = gl.load(positions + token)
    key += kv_head.to(gl.int64) * stride_k_head
    value += kv_head.to(gl.int64) * stride_v_head
    key_words += kv_head.to(gl.int64) * (stride_k_head // EACH)
    value_words += kv_head.to(gl.int64) * (stride_v_head // EACH)

    # The elements of a head.
    dim, pair, partner, is_first = partners(D, R, INTERLEAVED, of_dim)
    rotated = dim < R
    if not INTERLEAVED and R % 16 == 0:
        # A thread's elements have adjacent partners, which the compiler does not see.
        pair = gl.max_contiguous(gl.multiple_of(pair, 8), 8)
        partner = gl.max_contiguous(gl.multiple_of(partner, 8), 8)
    own = qkv + (H + kv_head) * D

    # This search precedes all loads from the cache; the product before this kernel still runs.
    if READS != "never":
        writer = _writer(table, slots, positions, num_written, newest, begin, end, PAGE, READS)
        if writer >= 0:
            # Write another request's token, so that all threads of this program can read it. The token's own program
            # writes the same values, up to the rounding of a norm's sum.
            if OVERLAP:
                depend("griddepcontrol.wait; // $0")
            cos, sin = _angles(cos_sin, gl.load(positions + writer), pair, is_first, rotated, R)
            source = own + writer.to(gl.int64) * stride_qkv
            x, y = _loaded(source, dim, partner, rotated)
            k_weight, k_partner_weight = _norm_weights(k_norm, dim, partner, rotated)
            _store(
                key,
                value,
                gl.load(slots + writer),
                dim,
                _key(x, y, k_weight, k_partner_weight, cos, sin, eps, key, k_scale, dtype, NORM, LIMIT),
                _in_cache(gl.load(source + K * D + dim), value, v_scale, LIMIT),
                stride_k_page,
                stride_k_token,
                stride_v_page,
                stride_v_token,
                PAGE,
            )
            barrier()

    keys = gl.allocate_shared_memory(word, [RING, BLOCK_N, W], gl.NVMMASharedLayout.get_default_for([BLOCK_N, W], word))
    values = keys
    if APART:
        values = gl.allocate_shared_memory(
            word, [RING, BLOCK_N, W], gl.NVMMASharedLayout.get_default_for([BLOCK_N, W], word)
        )
    queries = gl.allocate_shared_memory(
        dtype, [EACH, COLUMNS, W], gl.NVMMASharedLayout.get_default_for([COLUMNS, W], dtype)
    )
    weights = gl.allocate_shared_memory(
        dtype, [COLUMNS, BLOCK_N], gl.NVMMASharedLayout.get_default_for([COLUMNS, BLOCK_N], dtype)
    )
    # What tiles are copied from, with the strides of a page and of a token.
    key_source = (key_words, stride_k_page // EACH, stride_k_token // EACH)
    value_source = (value_words, stride_v_page // EACH, stride_v_token // EACH)
    first_source = value_source if APART else key_source
    second_source = key_source if APART else value_source
    # The first tiles are copied before qkv is there: keys, values, keys, …
    for buffer in gl.static_range(BUFFERS):
        source = key_source if buffer % 2 == 0 else value_source
        if begin + buffer // 2 * BLOCK_N < end:
            to = keys.index(buffer // 2 if APART else buffer)
            if APART and buffer % 2 == 1:
                to = values.index(buffer // 2)
            copy_tile(
                to, source[0], pages[buffer // 2], begin + buffer // 2 * BLOCK_N, earliest, end, source[1], source[2],
                PAGE, RUN, WINDOW, runs, copied,
            )  # fmt: skip
        if buffer < BUFFERS - 1:  # the last tile is of the group that the loop commits first
            async_copy.commit_group()

    cos, sin = _angles(cos_sin, position, pair, is_first, rotated, R)
    q_weight, q_partner_weight = _norm_weights(q_norm, dim, partner, rotated)
    k_weight, k_partner_weight = _norm_weights(k_norm, dim, partner, rotated)
    column = gl.arange(0, COLUMNS, of_scores)
    sink = gl.full([COLUMNS], float("-inf"), gl.float32, of_scores)
    if sinks is not None:
        sink = gl.load(sinks + kv_head * GROUP + column, mask=column < GROUP, other=0.0).to(gl.float32) * LOG2_E
    if OVERLAP:
        depend("griddepcontrol.wait; // $0")

    given = qkv + token.to(gl.int64) * stride_qkv
    own += token.to(gl.int64) * stride_qkv
    row = gl.arange(0, COLUMNS, of_row)
    source = (given + (kv_head * GROUP + row) * D)[:, None]
    is_query = (row < GROUP)[:, None]
    x = gl.load(source + dim[None, :], mask=is_query, other=0.0).to(gl.float32)
    y = gl.load(source + partner[None, :], mask=is_query & rotated[None, :], other=0.0).to(gl.float32)
    new_value = _in_cache(gl.load(own + K * D + dim), value, v_scale, LIMIT)
    # Of a word's first element, and of its second.
    of_word = own + K * D + EACH * gl.arange(0, W, gl.SliceLayout(1, summed))
    value_of_sums = _in_cache(gl.load(of_word), value, v_scale, LIMIT).to(gl.float32)
    second_of_sums = value_of_sums
    if FP8:
        second_of_sums = _in_cache(gl.load(of_word + 1), value, v_scale, LIMIT).to(gl.float32)
    key_x, key_y = _loaded(own, dim, partner, rotated)
    # All of these loads are under way before the first is waited for.
    issued = _issued()
    x = gl.where(issued, x, 0.0)
    y = gl.where(issued, y, 0.0)
    key_x = gl.where(issued, key_x, 0.0)
    key_y = gl.where(issued, key_y, 0.0)
    new_key = _key(key_x, key_y, k_weight, k_partner_weight, cos, sin, eps, key, k_scale, dtype, NORM, LIMIT)
    query = _rotated(
        x,
        y,
        _norm_factor(gl.sum(x * x, 1), eps, D)[:, None],
        q_weight[None, :],
        q_partner_weight[None, :],
        cos[None, :],
        sin[None, :],
        dtype,
        NORM,
    )
    if FP8:
        of_first, of_second = gl.split(query.reshape([COLUMNS, W, 2]))
        queries.index(0).store(of_first)
        queries.index(1).store(of_second)
    else:
        queries.index(0).store(query)
    if (slot >= 0) & (split == 0):
        _store(
            key,
            value,
            slot,
            dim,
            new_key,
            new_value,
            stride_k_page,
            stride_k_token,
            stride_v_page,
            stride_v_token,
            PAGE,
        )

    # The new key and value, and the sink (a key without a value), start the running softmax of the first split.
    score = gl.convert_layout(gl.sum(query.to(gl.float32) * new_key.to(gl.float32)[None, :], 1), of_scores)
    score = scaled(score, scale, soft_cap, HAS_CAP)
    highest = gl.maximum(score, sink)
    opened = gl.exp2(score - highest)
    opening = opened + gl.exp2(sink - highest)
    if SPLIT:
        highest = gl.where(split == 0, highest, float("-inf"))
        opened = gl.where(split == 0, opened, 0.0)
        opening = gl.where(split == 0, opening, 0.0)
    acc = value_of_sums[:, None] * gl.convert_layout(opened, of_sums)[None, :]
    second_acc = acc
    if FP8:
        second_acc = second_of_sums[:, None] * gl.convert_layout(opened, of_sums)[None, :]
    of_tile = gl.arange(0, BLOCK_N, gl.SliceLayout(1, scored))
    # The softmax's sum, of the keys in each row: rows are summed up at the end, for that takes all warps.
    total = gl.where((of_tile == 0)[:, None], opening[None, :], 0.0)

    first_page = pages[FIRST_AHEAD]  # type: ignore[var-annotated]
    second_page = pages[SECOND_AHEAD]  # type: ignore[var-annotated]
    key_place = newest * 0
    # Of the values of the tile before. Not ``key_place`` here: Triton takes a variable to be loop-carried only if an
    # iteration gives it another value.
    value_place = newest * 0 - 1
    for tile in range(begin, end, BLOCK_N):
        ready(BUFFERS - 2)
        key_tile = keys.index(key_place)
        scores = gl.zeros([BLOCK_N, COLUMNS], gl.float32, scored)
        asked = queries.index(0).permute((1, 0))
        if FP8:
            key_words_there = key_tile.load(of_keys)
            key_first = elements(key_words_there, False, cached, dtype)
            scores = warpgroup_mma(key_first, asked, scores, use_acc=False, is_async=True)
            key_second = elements(key_words_there, True, cached, dtype)
            scores = warpgroup_mma(key_second, queries.index(1).permute((1, 0)), scores, is_async=True)
        else:
            scores = warpgroup_mma(key_tile, asked, scores, use_acc=False, is_async=True)
        # All warps are done with the values of the tile before: their buffer is free.
        ahead = tile + FIRST_AHEAD * BLOCK_N
        if (tile > begin) & (ahead < end):
            copy_tile(
                values.index(value_place), first_source[0], first_page, ahead, earliest, end, first_source[1],
                first_source[2], PAGE, RUN, WINDOW, runs, copied,
            )  # fmt: skip
        async_copy.commit_group()
        page = pages_of_runs(table, tile + (SECOND_AHEAD + 1) * BLOCK_N, end, BLOCK_N, PAGE, RUN, runs)
        scores = warpgroup_mma_wait(0, [scores, key_first, key_second])[0] if FP8 else warpgroup_mma_wait(0, [scores])
        scores = scaled(scores, scale, soft_cap, HAS_CAP)
        seen = tile + of_tile < end
        if WINDOW > 0:
            seen = seen & (tile + of_tile >= earliest)
        scores = gl.where(seen[:, None], scores, float("-inf"))
        # The first split starts with a key, and the tiles of the others have keys that are seen.
        new_highest = gl.maximum(highest, gl.max(scores, 0))
        shrink = gl.exp2(highest - new_highest)
        scores = gl.exp2(scores - new_highest[None, :])
        total = total * shrink[None, :] + scores
        highest = new_highest
        weights.store(scores.to(dtype).permute((1, 0)))
        fence_async_shared()  # of the weights, which threads have stored
        ready(BUFFERS - 2)
        value_place = key_place if APART else (key_place + 1) % RING
        value_tile = values.index(value_place).permute((1, 0))
        factor = gl.convert_layout(shrink, of_sums)[None, :]
        acc *= factor
        if FP8:
            second_acc *= factor
            value_words_there = value_tile.load(of_values)
            value_first = elements(value_words_there, False, cached, dtype)
            value_second = elements(value_words_there, True, cached, dtype)
            acc = warpgroup_mma(value_first, weights.permute((1, 0)), acc, is_async=True)
            second_acc = warpgroup_mma(value_second, weights.permute((1, 0)), second_acc, is_async=True)
        else:
            acc = warpgroup_mma(value_tile, weights.permute((1, 0)), acc, is_async=True)
        # All warps are done with this tile's keys: their buffer is free.
        ahead = tile + SECOND_AHEAD * BLOCK_N
        if ahead < end:
            copy_tile(
                keys.index(key_place), second_source[0], second_page, ahead, earliest, end, second_source[1],
                second_source[2], PAGE, RUN, WINDOW, runs, copied,
            )  # fmt: skip
        async_copy.commit_group()
        if FP8:
            acc, second_acc, value_first, value_second = warpgroup_mma_wait(
                0, [acc, second_acc, value_first, value_second]
            )
        else:
            acc = warpgroup_mma_wait(0, [acc])
        key_place = (value_place + 1) % RING
        first_page = second_page if APART else page
        second_page = page

    total = gl.sum(total, 0)
    if FP8:
        acc *= v_scale
        second_acc *= v_scale
    # Adjacent threads store adjacent memory.
    lanes: gl.constexpr = min(32, D // 4)
    stored: gl.constexpr = gl.BlockedLayout([1, 4], [32 // lanes, lanes], [warps, 1], [1, 0])
    of_stored: gl.constexpr = gl.SliceLayout(1, stored)
    column = gl.arange(0, COLUMNS, of_stored)
    used = column < GROUP
    element = gl.arange(0, D, gl.SliceLayout(0, stored))[None, :]
    to = out + token.to(gl.int64) * stride_o_token + kv_head.to(gl.int64) * GROUP * stride_o_head
    if SPLIT:  # noqa: SIM102 - constexpr, unlike the next
        if working > 1:
            # Rows of partial results: split, token, head.
            first_row = (token.to(gl.int64) * K + kv_head) * GROUP
            split_rows = num_tokens.to(gl.int64) * H
            mine = split * split_rows + first_row + column
            sums = gl.convert_layout(_heads(acc, second_acc, FP8), stored)
            gl.store((partials + mine * D)[:, None] + element, sums, mask=used[:, None], eviction_policy=EVICT_LAST)
            gl.store(stats + mine * 2, gl.convert_layout(highest, of_stored), mask=used, eviction_policy=EVICT_LAST)
            gl.store(stats + mine * 2 + 1, gl.convert_layout(total, of_stored), mask=used, eviction_policy=EVICT_LAST)
            barrier()  # all stores of this program come before its arrival
            arrival = arrivals + request * K + kv_head
            if gl.atomic_add(arrival, 1, sem="acq_rel", scope="gpu") != working - 1:
                return
            gl.store(arrival, 0)
            _merge(partials, stats, to, first_row, split_rows, working, stride_o_head, GROUP, COLUMNS, D)
            return
    acc = (acc / gl.convert_layout(total, of_sums)[None, :]).to(out.dtype.element_ty)
    second_acc = (second_acc / gl.convert_layout(total, of_sums)[None, :]).to(out.dtype.element_ty)
    result = gl.convert_layout(_heads(acc, second_acc, FP8), stored)
    gl.store((to + column * stride_o_head)[:, None] + element, result, mask=used[:, None], eviction_policy=EVICT_LAST)


class Tile(NamedTuple):
    """The tile of a program, and how many of them a multiprocessor runs at a time."""

    keys: int
    buffers: int
    """Tiles of keys or of values in shared memory or on their way there, at least two."""
    warps: int
    programs: int


def _words_of_key(layer: PagedAttentionSpec) -> int:
    """Elements of a cached key, or of an FP8 one pairs of them: see the kernel."""
    return layer.head_dim if layer.cache_dtype == layer.dtype else layer.head_dim // 2


class HopperDecodeAttention:
    """See the module; ``overlap``: see :func:`atom_core.kernels.triton_support.overlaps`."""

    def __init__(self, spec: DecodeAttentionSpec, overlap: bool) -> None:
        self.spec, self.overlap = spec, overlap
        self.words = _words_of_key(spec.attention)
        #: Query heads that share a key.
        self.group: int = spec.attention.num_heads // spec.attention.num_kv_heads
        self.columns: int = max(_COLUMNS, next_power_of_2(self.group))
        self.split_buffers = SplitBuffers()

    @staticmethod
    def fits(spec: DecodeAttentionSpec) -> bool:
        """Whether the kernel supports a layer, on Hopper."""
        layer = spec.attention
        # Four warps multiply 64 rows at a time, which a value's words are.
        sizes = _words_of_key(layer) in (64, 128, 256) and layer.head_dim <= 256
        shared = layer.num_heads // layer.num_kv_heads <= _MAX_COLUMNS
        dtypes = layer.dtype.itemsize == 2 and layer.cache_dtype in (layer.dtype, *_FP8)
        return sizes and shared and dtypes and why_no_gluon() is None

    @staticmethod
    def takes(cache: KVCacheView) -> bool:
        """Whether rows of the cache are aligned to 16 bytes, as Triton knows of arguments that are multiples of 16."""
        return aligned(cache)

    def attention_compile_keys(self, shape: BatchShape, device: torch.device) -> Iterator[Hashable]:
        """See :class:`atom_core.kernels.compile_keys.AttentionCompileKeys`."""
        programs = shape.num_requests * self.spec.attention.num_kv_heads
        tile = self.tile(programs, device)
        count = self.splits(programs, shape.max_seq_len, tile, device)
        yield "hopper", tile, self._min_tiles(programs, count, tile, device)

    def tile(self, programs: int, device: torch.device) -> Tile:
        """The tile for a number of programs without splits; every choice is correct for every batch.

        A program waits several times a tile, and others of its multiprocessor work meanwhile: the more, the better, as
        long as their copies on the way cover the memory's latency. Few programs, which are split, wait less often with
        more keys a tile. Measured on an H200, for groups of up to 16 heads.
        """
        wanted = self._fastest(programs, multiprocessors(device))
        if self._shared_bytes(wanted) <= _SHARED // wanted.programs - _RESERVED:
            return wanted
        # The queries of a wide group take much of the shared memory.
        spare = _SHARED - _RESERVED - self._shared_bytes(Tile(64, 0, 4, 1))
        return Tile(64, min(6, spare // (2 * 64 * self.words)), 4, 1)

    def _fastest(self, programs: int, num_multiprocessors: int) -> Tile:
        """The tile that took the least time, if shared memory has room for it."""
        fp8 = self.words < self.spec.attention.head_dim
        if self.words == 256:
            return Tile(128, 3, 8, 1) if programs <= num_multiprocessors else Tile(64, 3, 4, 2)
        if self.words == 128 and fp8:
            return Tile(64, 4, 4, 2)  # widened elements of more keys spill
        if self.words == 128 and programs * MAX_SPLITS <= num_multiprocessors:
            return Tile(128, 6, 4, 1)  # there are no more programs than multiprocessors
        if self.words == 128:
            return Tile(128, 3, 4, 2) if programs <= 2 * num_multiprocessors else Tile(64, 3, 4, 4)
        buffers = 4 if fp8 else 6
        if programs <= num_multiprocessors // 4 or self.columns > _COLUMNS:
            return Tile(128, buffers, 4, 2)
        return Tile(64, buffers, 4, 4)

    def _shared_bytes(self, tile: Tile) -> int:
        """Bytes of shared memory of a program: tiles, queries, weights, and each warp's maxima."""
        copied = tile.buffers * tile.keys * self.words * 2
        return copied + self.columns * (2 * (self.spec.attention.head_dim + tile.keys) + 4 * tile.warps)

    def splits(self, programs: int, max_seq_len: int, tile: Tile, device: torch.device) -> int:
        """The number of splits of each request."""
        return count_splits(programs, max_seq_len, device, tile.programs)

    def _min_tiles(self, programs: int, count: int, tile: Tile, device: torch.device) -> int:
        """The fewest tiles of one of ``count`` splits: one where all run at the same time; 0: one split."""
        if count < 2:
            return 0
        at_once = programs * count <= tile.programs * multiprocessors(device)
        return 1 if at_once else max(1, _MIN_KEYS // tile.keys)

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
        """As :meth:`atom_core.kernels.decode_attention.triton_kernel.TritonDecodeAttention.__call__`."""
        spec, heads, device = self.spec.attention, self.spec.qkv, qkv.device
        num_requests, num_tokens = batch.seq_lens.shape[0], qkv.shape[0]
        programs, rows = num_requests * spec.num_kv_heads, num_tokens * spec.num_heads
        tile = self.tile(programs, device)
        count = self.splits(programs, batch.max_seq_len, tile, device)
        splits = self.split_buffers.of(count, rows, spec.head_dim, device)
        scale, soft_cap = to_base_2(spec)
        key, value = cache.key, cache.value
        words = (key, value) if key.dtype == spec.dtype else (key.view(torch.int16), value.view(torch.int16))
        decode_attention_hopper[num_requests, spec.num_kv_heads, splits.count](
            qkv,
            positions,
            batch.pages.slots,
            weights.cos_sin,
            weights.q_norm,
            weights.k_norm,
            key,
            value,
            *words,
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
            scale * cache.k_scale,
            cache.k_scale,
            cache.v_scale,
            soft_cap,
            qkv.stride(0),
            *key.stride()[:3],
            *value.stride()[:3],
            *out.stride()[:2],
            batch.pages.table.stride(0),
            PAGE=cache.page_size,
            H=spec.num_heads,
            K=spec.num_kv_heads,
            D=spec.head_dim,
            R=heads.rotary_dim,
            COLUMNS=self.columns,
            BLOCK_N=tile.keys,
            BUFFERS=tile.buffers,
            INTERLEAVED=heads.interleaved,
            WINDOW=spec.window or 0,
            HAS_CAP=bool(spec.soft_cap),
            SPLIT=splits.count > 1,
            MIN_TILES=self._min_tiles(programs, splits.count, tile, device),
            READS=self.spec.reads,
            LIMIT=saturation_limit(key.dtype),
            OVERLAP=self.overlap,
            num_warps=tile.warps,
            **launch_options(self.overlap),
        )
