"""Decode over latents on Hopper, in Gluon: tensor cores read cached rows from shared memory, as keys and as values.

A request has one query token, or a few tokens of speculative decoding; each sees one key more than the one before.

The 64 rows of a ``wgmma`` are keys for the scores, and elements of the latent for the outputs; the few heads are its
columns. So neither operand moves to registers, and most of a tile's time is the memory's. A multiprocessor runs one
program, which copies a tile of rows while it works on the one before.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from atom_core.batch import Batch, BatchShape
from atom_core.cache import LatentCacheView
from atom_core.kernels.attention.splits import SplitBuffers, Splits, count_splits
from atom_core.kernels.attention.triton_parts import LOG2_E
from atom_core.kernels.eviction import eviction_policy
from atom_core.kernels.launch import entry_kernel
from atom_core.kernels.linear.few_rows_hopper import barrier, depend, load, ready
from atom_core.kernels.linear.helpers import FETCH_ROWS
from atom_core.kernels.linear.tiles import why_no_gluon
from atom_core.kernels.mla_attention.spec import MlaAttentionSpec
from atom_core.kernels.triton_support import cdiv, launch_options, next_power_of_2

#: Keys of a tile: the rows of a ``wgmma``.
KEYS = 64
#: The fewest tiles of a split: merging splits takes the time of a few tiles.
MIN_TILES = 4
#: (number of requests, heads of a program, over all query tokens), and the heads for more requests. With few requests
#: more programs fit, each with fewer heads, but every program reads all rows of its request.
_HEADS, _MAX_HEADS = ((8, 16), (32, 32)), 64
#: The most query tokens of a request.
MAX_QUERIES = 8
#: The fewest requests whose first tiles are prefetched to the L2 cache while the previous kernel ends: with fewer, the
#: added instruction costs more than it gains.
_FETCHING = 32
#: Bytes of one copy.
_VECTOR = 16


@gluon.jit
def pages_of(table, key, end, PAGE: gl.constexpr):
    """The page of each key before ``end``."""
    return gl.load(table + key // PAGE, mask=key < end, other=0)


@gluon.jit
def copy_rows(
    latents, keys, rows, key, page, end, stride_page, stride_row, L: gl.constexpr, R: gl.constexpr, PAGE: gl.constexpr
):
    """Copy a tile of rows to shared memory, with zeros after the last row."""
    layout: gl.constexpr = key.type.layout.parent
    row = rows + (page.to(gl.int64) * stride_page + (key % PAGE).to(gl.int64) * stride_row)[:, None]
    known = (key < end)[:, None]
    load(latents, row + gl.arange(0, L, gl.SliceLayout(0, layout))[None, :], mask=known)
    load(keys, row + L + gl.arange(0, R, gl.SliceLayout(0, layout))[None, :], mask=known)


@gluon.jit
def _copy_next(
    latents,
    keys,
    place,
    rows,
    key,
    page,
    tile,
    end,
    stride_page,
    stride_row,
    L: gl.constexpr,
    R: gl.constexpr,
    PAGE: gl.constexpr,
):
    """Start to copy the next tile's rows, if any, to one of two buffers; this commits a group of copies in any case."""
    if tile + key.shape[0] < end:
        copy_rows(latents.index(place), keys.index(place), rows, key, page, end, stride_page, stride_row, L, R, PAGE)
    async_copy.commit_group()


@gluon.jit
def _fetch(
    rows,
    table,
    begin,
    end,
    stride_page,
    stride_row,
    ROW: gl.constexpr,
    PAGE: gl.constexpr,
    BLOCK_N: gl.constexpr,
):
    """Prefetch a tile's rows of ``ROW`` elements to the L2 cache, some bytes of a row by each thread.

    Later stores go through the L2 cache, so loads after the wait never see stale data.
    """
    warps: gl.constexpr = gl.num_warps()
    threads: gl.constexpr = max(1, warps * 32 // BLOCK_N)
    layout: gl.constexpr = gl.BlockedLayout([1, 1], [32 // threads, threads], [warps, 1], [1, 0])
    size: gl.constexpr = rows.dtype.element_ty.primitive_bitwidth // 8
    width: gl.constexpr = (ROW * size // 16 + threads - 1) // threads * 16
    key = begin + gl.arange(0, BLOCK_N, gl.SliceLayout(1, layout))
    page = pages_of(table, key, end, PAGE)
    at = rows + (page.to(gl.int64) * stride_page + (key % PAGE).to(gl.int64) * stride_row)[:, None]
    first = gl.arange(0, threads, gl.SliceLayout(0, layout))[None, :] * width
    at = at.to(gl.int64, bitcast=True) + first
    asked = gl.where((key < end)[:, None], gl.minimum(ROW * size - first, width), 0)
    gl.inline_asm_elementwise(
        FETCH_ROWS,
        "=r,l,r",
        [at, asked],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def _row(row, count, H: gl.constexpr, HEADS: gl.constexpr, QUERIES: gl.constexpr):
    """The token and the head of each row, and whether it has any."""
    if QUERIES == 1:
        token = row * 0
        head = gl.program_id(1) * HEADS + row
        known = row < HEADS
    else:
        token = row // HEADS
        head = gl.program_id(1) * HEADS + row % HEADS
        known = token < count
    return token, head, known & (head < H)


@gluon.jit
def _load_split(partials, stats, mine, used, column, L: gl.constexpr):
    """A split's largest scores, softmax sums and outputs of rows where ``used``; elsewhere those of no keys."""
    highest = gl.load(stats + mine * 2, mask=used, other=float("-inf"), cache_modifier=".cg")
    total = gl.load(stats + mine * 2 + 1, mask=used, other=0.0, cache_modifier=".cg")
    source = (partials + mine * L)[:, None] + column[None, :]
    return highest, total, gl.load(source, mask=used[:, None], other=0.0, cache_modifier=".cg")


@gluon.jit
def _merge(
    partials, stats, at, split_rows, working, used, to, L: gl.constexpr, layout: gl.constexpr, POLICY: gl.constexpr
):
    """Merge the splits of a program's rows, at ``at`` in the partial results, and write them to ``to``."""
    warps: gl.constexpr = gl.num_warps()
    BLOCK_M: gl.constexpr = at.shape[0]
    # Two splits are loaded at a time, which fill the registers.
    block: gl.constexpr = min(L, warps * 2048 // BLOCK_M)
    for first in gl.static_range(0, L, block):
        column = first + gl.arange(0, block, gl.SliceLayout(0, layout))
        highest = gl.full([BLOCK_M], float("-inf"), gl.float32, gl.SliceLayout(1, layout))
        total = gl.zeros([BLOCK_M], gl.float32, gl.SliceLayout(1, layout))
        acc = gl.zeros([BLOCK_M, block], gl.float32, layout)
        for index in range(0, working, 2):
            mine = index * split_rows + at
            one_highest, one_total, one = _load_split(partials, stats, mine, used, column, L)
            there = used & (index + 1 < working)
            two_highest, two_total, two = _load_split(partials, stats, mine + split_rows, there, column, L)
            # All queries see keys of the first split, so the maximum is finite.
            new_highest = gl.maximum(highest, gl.maximum(one_highest, two_highest))
            shrink = gl.exp2(highest - new_highest)
            one_shrink = gl.exp2(one_highest - new_highest)
            two_shrink = gl.exp2(two_highest - new_highest)
            total = total * shrink + one_total * one_shrink + two_total * two_shrink
            acc = acc * shrink[:, None] + one * one_shrink[:, None] + two * two_shrink[:, None]
            highest = new_highest
        acc = acc / total[:, None]
        gl.store(to[:, None] + column[None, :], acc.to(to.dtype.element_ty), mask=used[:, None], eviction_policy=POLICY)


@entry_kernel
@gluon.jit(do_not_specialize=["num_tokens", "done_tiles"])
def latent_decode_hopper(
    q,
    rows,
    out,
    partials,
    stats,
    arrivals,
    query_start_loc,
    seq_lens,
    page_table,
    num_tokens,
    done_tiles,
    scale,
    stride_q_token,
    stride_q_head,
    stride_page,
    stride_row,
    stride_o_token,
    stride_o_head,
    stride_table,
    PAGE: gl.constexpr,
    H: gl.constexpr,
    HEADS: gl.constexpr,
    QUERIES: gl.constexpr,
    L: gl.constexpr,
    R: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    SPLIT: gl.constexpr,
    MIN_TILES: gl.constexpr,
    FETCH: gl.constexpr,
    POLICY: gl.constexpr,
    OVERLAP: gl.constexpr,
):
    """``HEADS`` heads of a request, which has up to ``QUERIES`` query tokens; a padded one has none.

    Without ``out`` it leaves splits of ``MIN_TILES`` tiles or more for the next launch to merge. It skips requests of
    up to ``done_tiles`` tiles, which an earlier launch has done.
    """
    MERGED: gl.constexpr = out is not None
    # Whether the copy of the next tile starts before the wait for this one, so two are in flight. With 64 heads that
    # makes a step up to 0.5% slower on an H200.
    EARLY: gl.constexpr = BLOCK_M == 16
    if OVERLAP:
        depend("griddepcontrol.launch_dependents; // $0")
    dtype: gl.constexpr = rows.dtype.element_ty
    warps: gl.constexpr = gl.num_warps()
    across: gl.constexpr = warps // 4
    copied: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [warps, 1], [1, 0])
    scored: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, across], [16, BLOCK_M // across, 16])
    summed: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, BLOCK_M, 16])
    of_scores: gl.constexpr = gl.SliceLayout(0, scored)
    of_sums: gl.constexpr = gl.SliceLayout(0, summed)
    request = gl.program_id(0)
    split = gl.program_id(2)
    start = gl.load(query_start_loc + request)
    count = gl.load(query_start_loc + request + 1) - start
    length = gl.load(seq_lens + request)
    if (count == 0) | (length <= done_tiles * BLOCK_N):
        # One idle program still waits, so that a wait for this kernel is also a wait for the kernels before it.
        if OVERLAP and request + gl.program_id(1) + split == 0:
            depend("griddepcontrol.wait; // $0")
        return
    end = length
    begin = end * 0
    working = end * 0 + 1
    if SPLIT:
        num_tiles = gl.cdiv(end, BLOCK_N)
        share = gl.maximum(gl.cdiv(num_tiles, gl.num_programs(2)), MIN_TILES)
        if MERGED:
            # One program merges all splits, each as large as a tile of keys: no more splits than tiles in a split.
            share = gl.maximum(share, gl.ceil(gl.sqrt(num_tiles.to(gl.float32))).to(gl.int32))
        working = gl.cdiv(num_tiles, share)
        if split >= working:
            return
        begin = split * share * BLOCK_N
        end = gl.minimum(begin + share * BLOCK_N, end)

    latents = gl.allocate_shared_memory(
        dtype, [2, BLOCK_N, L], gl.NVMMASharedLayout.get_default_for([BLOCK_N, L], dtype)
    )
    keys = gl.allocate_shared_memory(dtype, [2, BLOCK_N, R], gl.NVMMASharedLayout.get_default_for([BLOCK_N, R], dtype))
    plain = gl.allocate_shared_memory(dtype, [BLOCK_M, L], gl.NVMMASharedLayout.get_default_for([BLOCK_M, L], dtype))
    rope_q = gl.allocate_shared_memory(dtype, [BLOCK_M, R], gl.NVMMASharedLayout.get_default_for([BLOCK_M, R], dtype))
    weights = gl.allocate_shared_memory(
        dtype, [BLOCK_N, BLOCK_M], gl.NVMMASharedLayout.get_default_for([BLOCK_N, BLOCK_M], dtype)
    )
    table = page_table + request.to(gl.int64) * stride_table
    key = begin + gl.arange(0, BLOCK_N, gl.SliceLayout(1, copied))
    page = pages_of(table, key, end, PAGE)
    # No load so far reads what a kernel of this package writes. This step may also write rows of earlier tokens:
    # requests with a common prefix share pages, and one of them may fill a page in this step.
    if OVERLAP:
        if FETCH:
            _fetch(rows, table, begin, end, stride_page, stride_row, L + R, PAGE, BLOCK_N)
        depend("griddepcontrol.wait; // $0")
    copy_rows(latents.index(0), keys.index(0), rows, key, page, end, stride_page, stride_row, L, R, PAGE)
    async_copy.commit_group()
    token, head, used = _row(gl.arange(0, BLOCK_M, gl.SliceLayout(1, copied)), count, H, HEADS, QUERIES)
    used = used[:, None]
    query = q + (start + token).to(gl.int64)[:, None] * stride_q_token + head.to(gl.int64)[:, None] * stride_q_head
    plain.store(gl.load(query + gl.arange(0, L, gl.SliceLayout(0, copied))[None, :], mask=used, other=0.0))
    rope_q.store(gl.load(query + L + gl.arange(0, R, gl.SliceLayout(0, copied))[None, :], mask=used, other=0.0))
    key += BLOCK_N
    page = pages_of(table, key, end, PAGE)

    highest = gl.full([BLOCK_M], float("-inf"), gl.float32, of_scores)
    total = gl.zeros([BLOCK_M], gl.float32, of_scores)
    acc = gl.zeros([L, BLOCK_M], gl.float32, summed)
    place = 0
    of_tile = gl.arange(0, BLOCK_N, gl.SliceLayout(1, scored))
    token, head, used = _row(gl.arange(0, BLOCK_M, of_scores), count, H, HEADS, QUERIES)
    seen = length - count + 1 + token
    for tile in range(begin, end, BLOCK_N):
        if EARLY:
            barrier()  # all warps are done with the tile before
            _copy_next(latents, keys, 1 - place, rows, key, page, tile, end, stride_page, stride_row, L, R, PAGE)
            ready(1)
        else:
            ready(0)
        scores = gl.zeros([BLOCK_N, BLOCK_M], gl.float32, scored)
        scores = warpgroup_mma(latents.index(place), plain.permute((1, 0)), scores, use_acc=False, is_async=True)
        scores = warpgroup_mma(keys.index(place), rope_q.permute((1, 0)), scores, is_async=True)
        if not EARLY:
            _copy_next(latents, keys, 1 - place, rows, key, page, tile, end, stride_page, stride_row, L, R, PAGE)
        key += BLOCK_N
        page = pages_of(table, key, end, PAGE)
        scores = warpgroup_mma_wait(0, [scores])
        known = (tile + of_tile < end)[:, None]
        if QUERIES > 1:
            known &= (tile + of_tile)[:, None] < seen[None, :]
        scores = gl.where(known, scores * (scale * LOG2_E), float("-inf"))
        new_highest = gl.maximum(highest, gl.max(scores, 0))
        base = new_highest
        if QUERIES > 1:
            # A query may see no key of this split. A request's only query sees a key of each tile.
            base = gl.where(new_highest == float("-inf"), 0.0, new_highest)
        shrink = gl.exp2(highest - base)
        scores = gl.exp2(scores - base[None, :])
        total = total * shrink + gl.sum(scores, 0)
        highest = new_highest
        weights.store(scores.to(dtype))
        acc *= gl.convert_layout(shrink, of_sums)[None, :]
        fence_async_shared()
        barrier()
        acc = warpgroup_mma(latents.index(place).permute((1, 0)), weights, acc, is_async=True)
        acc = warpgroup_mma_wait(0, [acc])
        place = 1 - place

    # Adjacent threads store adjacent memory.
    stored: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [warps, 1], [1, 0])
    of_rows: gl.constexpr = gl.SliceLayout(1, stored)
    column = gl.arange(0, L, gl.SliceLayout(0, stored))
    token, head, used = _row(gl.arange(0, BLOCK_M, of_rows), count, H, HEADS, QUERIES)
    token += start
    # Rows of partial results: split, token, head.
    at = token.to(gl.int64) * H + head
    split_rows = num_tokens.to(gl.int64) * H
    if SPLIT:  # noqa: SIM102 - constexpr, unlike the next
        if (working > 1) | (not MERGED):
            mine = split * split_rows + at
            sums = gl.convert_layout(acc.permute((1, 0)), stored)
            gl.store((partials + mine * L)[:, None] + column[None, :], sums, mask=used[:, None], eviction_policy=POLICY)
            gl.store(stats + mine * 2, gl.convert_layout(highest, of_rows), mask=used, eviction_policy=POLICY)
            gl.store(stats + mine * 2 + 1, gl.convert_layout(total, of_rows), mask=used, eviction_policy=POLICY)
    if MERGED:
        to = out + token.to(gl.int64) * stride_o_token + head.to(gl.int64) * stride_o_head
        if SPLIT:  # noqa: SIM102 - likewise
            if working > 1:
                barrier()  # all stores of this program come before its arrival
                arrival = arrivals + request * gl.num_programs(1) + gl.program_id(1)
                if gl.atomic_add(arrival, 1, sem="acq_rel", scope="gpu") != working - 1:
                    return
                gl.store(arrival, 0)
                _merge(partials, stats, at, split_rows, working, used, to, L, stored, POLICY)
                return
        acc = acc / gl.convert_layout(total, of_sums)[None, :]
        result = gl.convert_layout(acc.to(out.dtype.element_ty).permute((1, 0)), stored)
        gl.store(to[:, None] + column[None, :], result, mask=used[:, None], eviction_policy=POLICY)


class LatentDecode:
    """See the module; ``overlap``: see :func:`atom_core.kernels.triton_support.overlaps`."""

    def __init__(self, spec: MlaAttentionSpec, overlap: bool) -> None:
        self.spec, self.overlap = spec, overlap
        self.split_buffers = SplitBuffers(fill_once=1)

    @staticmethod
    def fits(spec: MlaAttentionSpec) -> bool:
        """Whether the kernel supports a layer, on Hopper."""
        shape = spec.latent
        # The columns of tiles are powers of two, and the outputs of rank 512 fill the registers.
        sizes = shape.rank in (64, 128, 256, 512) and shape.rope_dim in (16, 32, 64)
        return sizes and shape.dtype.itemsize == 2 and shape.cache_dtype == shape.dtype and why_no_gluon() is None

    def takes(self, cache: LatentCacheView, batch: Batch) -> bool:
        """Whether it can run this batch and, during a capture, every batch that the graph can replay."""
        rows = cache.rows
        apart = rows.data_ptr() | rows.stride(0) * rows.itemsize | rows.stride(1) * rows.itemsize
        return self.takes_shape(batch) and cache.scale == 1.0 and apart % _VECTOR == 0

    def takes_shape(self, batch: Batch | BatchShape) -> bool:
        """The same, of pages whose rows are aligned."""
        return batch.max_query_len <= MAX_QUERIES

    def attention_compile_keys(self, shape: BatchShape, device: torch.device) -> Iterator[Hashable]:
        """See :class:`atom_core.kernels.compile_keys.AttentionCompileKeys`."""
        queries = next_power_of_2(shape.max_query_len)
        split = self.max_splits_of(shape, device) > 1
        yield self._heads(shape.num_requests, queries), queries, split, shape.num_requests >= _FETCHING

    def max_splits_of(self, shape: BatchShape, device: torch.device) -> int:
        """As :meth:`max_splits`."""
        return self._max_splits(shape.num_requests, shape.max_query_len, shape.max_seq_len, device)

    def _max_splits(self, num_requests: int, max_query_len: int, max_seq_len: int, device: torch.device) -> int:
        programs = num_requests * self.groups(num_requests, max_query_len)
        return count_splits(programs, max_seq_len, device, fill_once=1)

    def __call__(self, q: torch.Tensor, cache: LatentCacheView, batch: Batch, out: torch.Tensor) -> None:
        """As :meth:`atom_core.kernels.mla_attention.triton_kernel.TritonMlaAttention.__call__`."""
        shape, num_requests = self.spec.latent, batch.seq_lens.shape[0]
        splits = self.split_buffers.share(
            num_requests * self.groups(num_requests, batch.max_query_len),
            batch.max_seq_len,
            q.shape[0] * shape.num_heads,
            shape.rank,
            q.device,
        )
        self.launch(q, cache, batch, out, splits, MIN_TILES)

    def groups(self, num_requests: int, max_query_len: int) -> int:
        """Programs of a request without splits."""
        return int(cdiv(self.spec.latent.num_heads, self._heads(num_requests, max_query_len)))

    def max_splits(self, batch: Batch) -> int:
        """The most splits of a request that a launch without ``out`` leaves; 1: no splits."""
        return self._max_splits(len(batch.seq_lens), batch.max_query_len, batch.max_seq_len, batch.seq_lens.device)

    def _heads(self, num_requests: int, max_query_len: int) -> int:
        fitting = next((heads for limit, heads in _HEADS if num_requests <= limit), _MAX_HEADS)
        return int(min(self.spec.latent.num_heads, fitting // next_power_of_2(max_query_len)))

    def launch(
        self,
        q: torch.Tensor,
        cache: LatentCacheView,
        batch: Batch,
        out: torch.Tensor | None,
        splits: Splits,
        min_tiles: int,
        done_tiles: int = 0,
    ) -> None:
        """Write to ``out``; without it leave partial results of ``min_tiles`` tiles or more in ``splits``.

        Requests of up to ``done_tiles`` tiles are skipped.
        """
        assert out is not None or splits.count > 1
        shape, num_requests = self.spec.latent, batch.seq_lens.shape[0]
        queries = next_power_of_2(batch.max_query_len)
        heads = self._heads(num_requests, queries)
        tile_rows = max(16, next_power_of_2(queries * heads))
        latent_decode_hopper[num_requests, self.groups(num_requests, queries), splits.count](
            q,
            cache.rows,
            out,
            splits.partials,
            splits.stats,
            splits.arrivals,
            batch.query_start_loc,
            batch.seq_lens,
            batch.pages.table,
            q.shape[0],
            done_tiles,
            self.spec.scale,
            *q.stride()[:2],
            *cache.rows.stride()[:2],
            *(out.stride()[:2] if out is not None else (0, 0)),
            batch.pages.table.stride(0),
            PAGE=cache.page_size,
            H=shape.num_heads,
            HEADS=heads,
            QUERIES=queries,
            L=shape.rank,
            R=shape.rope_dim,
            BLOCK_M=tile_rows,
            BLOCK_N=KEYS,
            SPLIT=splits.count > 1,
            MIN_TILES=min_tiles,
            FETCH=num_requests >= _FETCHING,
            POLICY=eviction_policy(shape.num_heads),
            OVERLAP=self.overlap,
            num_warps=4 if tile_rows == 16 else 8,
            **launch_options(self.overlap),
        )
