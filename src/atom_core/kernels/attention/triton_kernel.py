"""Paged attention in Triton: prefill, decode and mixed batches in one launch.

A program takes ``BLOCK_Q`` query tokens of one request and all query heads of one key/value head, so a tile of keys
serves the whole group. It reads the request's keys in tiles of ``BLOCK_N`` with an online softmax (arXiv 2205.14135).
The programs of request ``r`` start at ``query_start_loc[r] // BLOCK_Q + r``: the grid depends on the numbers of tokens
and requests only, so a captured graph can replay any lengths.

If the programs are too few for the GPU, several share the keys of one tile of queries (splits, FlashDecoding,
https://crfm.stanford.edu/2023/10/12/flashdecoding.html). The grid limits the number of splits; the length determines
how many have keys. Each stores its partial result, and the last one to finish merges them in a fixed order.

``T`` tokens, ``H`` query heads, ``K`` key/value heads, ``D`` head size up to 256, ``P`` page size, any strides.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from atom_core.batch import Batch, BatchShape
from atom_core.cache import CacheOrder, KVCacheView
from atom_core.kernels.attention.hopper import PromptAttention
from atom_core.kernels.attention.splits import SplitBuffers, Splits, count_splits
from atom_core.kernels.attention.triton_parts import LOG2_E, range_of
from atom_core.kernels.launch import entry_kernel
from atom_core.kernels.triton_support import launch_options, multiprocessors, next_power_of_2, takes_amd_assembly
from atom_core.types import GraphSupport

if TYPE_CHECKING:
    from atom_core.kernels.attention import PagedAttentionSpec


@triton.jit
def capped(scores, soft_cap):
    """``soft_cap * tanh(scores / soft_cap)``."""
    # tanh(x) = 2 / (1 + exp(-2x)) - 1: Triton has exp on every target.
    return soft_cap * (2.0 / (1.0 + tl.exp(-2.0 * scores / soft_cap)) - 1.0)


@triton.jit
def wait_for_stores():
    """Make a wave (AMD) wait for its own stores."""
    tl.inline_asm_elementwise("s_waitcnt vmcnt(0)", "=v", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def is_last(arrival, working, AMD: tl.constexpr):
    """Whether this program is the last of ``working`` to have stored its partial result, and may load the others'.

    ``arrival`` counts the programs; the last one resets it to zero for the next launch.
    """
    if AMD:
        # Each XCD has its own L2. One wave runs the atomic below, which writes the L2 back; a barrier alone does not
        # wait until the other waves' stores have reached the L2: that failed on a later generation, see
        # https://github.com/llvm/llvm-project/pull/160501.
        wait_for_stores()
    tl.debug_barrier()  # all stores of this program come before its arrival
    last = tl.atomic_add(arrival, 1, sem="acq_rel", scope="gpu") == working - 1
    if last:
        tl.store(arrival, 0)
    if AMD:
        tl.debug_barrier()  # the count reaches the other waves by LDS, which orders nothing else
    return last


@triton.jit
def merged_splits(
    partials,
    stats,
    row,
    split_rows,
    working,
    row_used,
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    D_PADDED: tl.constexpr,
):
    """The softmax's sums and the weighted values of rows, merged from ``working`` splits."""
    dim = tl.arange(0, D_PADDED)
    mask = row_used[:, None] & (dim < D)[None, :]
    highest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, D_PADDED], tl.float32)
    for split in range(working):
        at = split * split_rows + row
        split_highest = tl.load(stats + at * 2, mask=row_used, other=float("-inf"), cache_modifier=".cg")
        split_total = tl.load(stats + at * 2 + 1, mask=row_used, other=0.0, cache_modifier=".cg")
        partial = tl.load(partials + at[:, None] * D + dim[None, :], mask=mask, other=0.0, cache_modifier=".cg")
        new_highest = tl.maximum(highest, split_highest)
        base = tl.where(new_highest == float("-inf"), 0.0, new_highest)
        shrink = tl.exp2(highest - base)
        split_shrink = tl.exp2(split_highest - base)
        total = total * shrink + split_total * split_shrink
        acc = acc * shrink[:, None] + partial * split_shrink[:, None]
        highest = new_highest
    return total, acc


@triton.jit
def scaled(scores, scale, soft_cap, HAS_CAP: tl.constexpr):
    """Logits to the base 2."""
    if HAS_CAP:
        scores = capped(scores * scale, soft_cap) * LOG2_E
    else:
        scores *= scale * LOG2_E
    return scores


#: One compiled kernel serves all values of these.
_VARYING = ["num_requests", "num_tokens"]


@entry_kernel
@triton.jit(do_not_specialize=_VARYING)
def _attention(
    q,
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
    num_requests,
    num_tokens,
    scale,
    k_scale,
    v_scale,
    soft_cap,
    stride_q_token,
    stride_q_head,
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
    GROUP: tl.constexpr,
    D: tl.constexpr,
    D_PADDED: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    SPLIT: tl.constexpr,
    STAGES: tl.constexpr,
    OVERLAP: tl.constexpr,
    AMD: tl.constexpr,
):
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    block = tl.program_id(0)
    kv_head = tl.program_id(1).to(tl.int64)
    split = tl.program_id(2)

    request = tl.cast(range_of(block, query_start_loc, num_requests, BLOCK_Q), tl.int64)
    start = tl.load(query_start_loc + request)
    num_queries = tl.load(query_start_loc + request + 1) - start
    first = (block - (start // BLOCK_Q + request).to(tl.int32)) * BLOCK_Q
    if first >= num_queries:
        return
    length = tl.load(seq_lens + request)

    # Row m of the tile is query token m // GROUP and the group's head m % GROUP.
    rows = tl.arange(0, BLOCK_M)
    token = first + rows // GROUP
    head = kv_head * GROUP + rows % GROUP
    row_used = (token < num_queries) & (rows < BLOCK_Q * GROUP)
    position = length - num_queries + token
    dim = tl.arange(0, D_PADDED)
    dim_used = dim < D
    q_at = (start + token).to(tl.int64)[:, None] * stride_q_token + head[:, None] * stride_q_head + dim[None, :]
    query = tl.load(q + q_at, mask=row_used[:, None] & dim_used[None, :], other=0.0)

    last_position = length - num_queries + tl.minimum(first + BLOCK_Q, num_queries) - 1
    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(length - num_queries + first - WINDOW + 1, 0) // BLOCK_N * BLOCK_N
    end = last_position + 1
    working = 1
    if SPLIT:
        num_tiles = tl.cdiv(end - begin, BLOCK_N)
        share = tl.cdiv(num_tiles, tl.num_programs(2))
        working = tl.cdiv(num_tiles, share)
        if split >= working:
            return
        begin += split * share * BLOCK_N
        end = tl.minimum(begin + share * BLOCK_N, end)

    highest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    if HAS_SINKS:  # noqa: SIM102 - constexpr, unlike the next
        # The sink is a key without a value: its logit starts the running softmax of the first split.
        if split == 0:
            highest = tl.load(sinks + head, mask=row_used, other=0.0).to(tl.float32) * LOG2_E
            total = tl.full([BLOCK_M], 1.0, tl.float32)
    acc = tl.zeros([BLOCK_M, D_PADDED], tl.float32)

    key += kv_head * stride_k_head
    value += kv_head * stride_v_head
    table = page_table + request * stride_table
    # Keys that every query of the tile sees need no mask; with a window all keys are masked.
    unmasked_end = begin
    if WINDOW == 0:
        seen_by_all = tl.minimum(length - num_queries + first + 1, end) - begin
        unmasked_end = begin + tl.maximum(seen_by_all, 0) // BLOCK_N * BLOCK_N
    for tile in tl.range(begin, unmasked_end, BLOCK_N, num_stages=STAGES):
        other = tile + tl.arange(0, BLOCK_N)
        page = tl.load(table + other // PAGE).to(tl.int64)
        offset = (other % PAGE).to(tl.int64)
        k_at = key + (page * stride_k_page + offset * stride_k_token)[None, :] + dim[:, None]
        keys = tl.load(k_at) if D == D_PADDED else tl.load(k_at, mask=dim_used[:, None], other=0.0)
        scores = tl.dot(query, keys.to(query.dtype), input_precision="ieee")
        scores = scaled(scores, scale * k_scale, soft_cap, HAS_CAP)
        new_highest = tl.maximum(highest, tl.max(scores, 1))
        weights = tl.exp2(scores - new_highest[:, None])
        shrink = tl.exp2(highest - new_highest)
        total = total * shrink + tl.sum(weights, 1)
        v_at = value + (page * stride_v_page + offset * stride_v_token)[:, None] + dim[None, :]
        values = tl.load(v_at) if D == D_PADDED else tl.load(v_at, mask=dim_used[None, :], other=0.0)
        acc = acc * shrink[:, None]
        acc = tl.dot(weights.to(query.dtype), values.to(query.dtype), acc, input_precision="ieee")
        highest = new_highest
    for tile in tl.range(unmasked_end, end, BLOCK_N, num_stages=STAGES):
        other = tile + tl.arange(0, BLOCK_N)
        known = other < length
        if WINDOW > 0:
            known &= other > length - num_queries + first - WINDOW
        page = tl.load(table + other // PAGE, mask=known, other=0).to(tl.int64)
        offset = (other % PAGE).to(tl.int64)
        k_at = key + (page * stride_k_page + offset * stride_k_token)[None, :] + dim[:, None]
        keys = tl.load(k_at, mask=dim_used[:, None] & known[None, :], other=0.0)
        scores = tl.dot(query, keys.to(query.dtype), input_precision="ieee")
        scores = scaled(scores, scale * k_scale, soft_cap, HAS_CAP)
        seen = (other[None, :] <= position[:, None]) & known[None, :] & row_used[:, None]
        if WINDOW > 0:
            seen &= other[None, :] > position[:, None] - WINDOW
        scores = tl.where(seen, scores, float("-inf"))
        new_highest = tl.maximum(highest, tl.max(scores, 1))
        # A row may have seen no key yet (its window starts later): keep exp2() away from inf - inf.
        base = tl.where(new_highest == float("-inf"), 0.0, new_highest)
        weights = tl.exp2(scores - base[:, None])
        shrink = tl.exp2(highest - base)
        total = total * shrink + tl.sum(weights, 1)
        v_at = value + (page * stride_v_page + offset * stride_v_token)[:, None] + dim[None, :]
        values = tl.load(v_at, mask=known[:, None] & dim_used[None, :], other=0.0)
        acc = acc * shrink[:, None]
        acc = tl.dot(weights.to(query.dtype), values.to(query.dtype), acc, input_precision="ieee")
        highest = new_highest

    if SPLIT:  # noqa: SIM102 - constexpr, unlike the next
        if working > 1:
            # Rows of partial results: split, token, head.
            at = ((start + token).to(tl.int64) * tl.num_programs(1) + kv_head) * GROUP + rows % GROUP
            split_rows = tl.cast(num_tokens, tl.int64) * tl.num_programs(1) * GROUP
            mine = split * split_rows + at
            mask = row_used[:, None] & dim_used[None, :]
            tl.store(partials + mine[:, None] * D + dim[None, :], acc, mask=mask)
            tl.store(stats + mine * 2, highest, mask=row_used)
            tl.store(stats + mine * 2 + 1, total, mask=row_used)
            if not is_last(arrivals + block * tl.num_programs(1) + kv_head, working, AMD):
                return
            total, acc = merged_splits(partials, stats, at, split_rows, working, row_used, D, BLOCK_M, D_PADDED)

    acc = acc * v_scale / tl.where(total == 0.0, 1.0, total)[:, None]
    o_at = (start + token).to(tl.int64)[:, None] * stride_o_token + head[:, None] * stride_o_head + dim[None, :]
    tl.store(out + o_at, acc.to(out.dtype.element_ty), mask=row_used[:, None] & dim_used[None, :])


class TritonAttention:
    """See :mod:`atom_core.kernels.attention`.

    Args:
        spec: the layer.
        nvidia: whether the GPU is NVIDIA's; AMD's have less shared memory.
        overlap: see :func:`atom_core.kernels.triton_support.overlaps`.
        hopper: whether the GPU is a Hopper, which has its own kernel for prompts.
    """

    order: CacheOrder = "plain"
    graph_support: GraphSupport = "always"

    def __init__(self, spec: PagedAttentionSpec, nvidia: bool, overlap: bool, hopper: bool = False) -> None:
        self.spec = spec
        self.prompts = PromptAttention(spec, overlap) if hopper and PromptAttention.fits(spec) else None
        self.wide = hopper and spec.dtype.itemsize == 2 and spec.head_dim > 32  # products of fewer columns gain little
        self.nvidia, self.overlap = nvidia, overlap
        self.group: int = spec.num_heads // spec.num_kv_heads
        self.decode_rows: int = max(16, next_power_of_2(self.group))  # tl.dot wants at least 16
        self.split_buffers = SplitBuffers()

    def _rows(self, max_query_len: int, d_padded: int) -> int:
        """Rows of a tile: the minimum if each request has few queries, else enough to reuse keys.

        Every choice is correct for every batch, so a captured graph can replay other lengths.
        """
        if max_query_len * self.group <= self.decode_rows:
            return self.decode_rows
        return max(self.decode_rows, 64 if d_padded * self.spec.dtype.itemsize <= 256 else 32)

    def _tile(self, shape: BatchShape | Batch, d_padded: int, device: torch.device) -> tuple[int, bool]:
        """Rows of a tile, and whether each request has few queries.

        Hopper multiplies 64 rows in a warp group: prompts take one group, or two where all multiprocessors have some.
        """
        rows = self._rows(shape.max_query_len, d_padded)
        if not self.wide or rows == self.decode_rows:
            return rows, rows == self.decode_rows
        programs = (shape.num_tokens // (128 // self.group) + shape.num_requests) * self.spec.num_kv_heads
        return 128 if programs >= multiprocessors(device) else 64, False

    def _keys_per_tile(self, d_padded: int, few_queries: bool, split: bool) -> int:
        """Keys of a tile: at most 64, so that two tiles of keys and values fit in gfx942's 64 KiB of shared memory.

        On NVIDIA, programs of split requests wait for memory most of the time, so they take twice as many; tiles of
        many queries take half as many, because the weights need registers, but on Hopper as many as it multiplies fast.
        """
        if self.wide and not few_queries:
            return 64
        keys = 64 // (2 if d_padded > 128 else 1) // (2 if self.spec.dtype == torch.float32 else 1)
        if not self.nvidia:
            return keys
        return 2 * keys if split else keys if few_queries else max(16, keys // 2)

    def attention_compile_keys(self, shape: BatchShape, device: torch.device) -> Iterator[Hashable]:
        """See :class:`atom_core.kernels.compile_keys.AttentionCompileKeys`."""
        block_m, few_queries = self._tile(shape, max(16, next_power_of_2(self.spec.head_dim)), device)
        blocks = shape.num_tokens // max(1, block_m // self.group) + shape.num_requests
        if self.prompts is not None and not few_queries:
            yield self.prompts.tile(shape, device)
        yield block_m, few_queries and count_splits(blocks * self.spec.num_kv_heads, shape.max_seq_len, device) > 1

    def plan_key(self) -> None:
        """No plan."""
        return

    def plan(self, batch: Batch) -> object:
        """Never called."""
        raise AssertionError("the Triton attention has no plan")

    def __call__(
        self,
        q: torch.Tensor,
        cache: KVCacheView,
        batch: Batch,
        sinks: torch.Tensor | None,
        out: torch.Tensor,
    ) -> None:
        """Write the attention of every request's queries to ``out``."""
        spec = self.spec
        assert q.stride(-1) == cache.key.stride(-1) == cache.value.stride(-1) == out.stride(-1) == 1
        num_requests, num_tokens = batch.seq_lens.shape[0], q.shape[0]
        d_padded = max(16, next_power_of_2(spec.head_dim))
        block_m, few_queries = self._tile(batch, d_padded, q.device)
        block_q = max(1, block_m // self.group)
        blocks = num_tokens // block_q + num_requests
        programs = blocks * spec.num_kv_heads
        if self.prompts is not None and not few_queries and self.prompts.takes(q, cache, out):
            self.prompts(q, cache, batch, sinks, out)
            return
        splits = Splits(1)
        if few_queries:
            rows = num_tokens * spec.num_heads
            splits = self.split_buffers.share(programs, batch.max_seq_len, rows, spec.head_dim, q.device)
        _attention[blocks, spec.num_kv_heads, splits.count](
            q,
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
            num_requests,
            num_tokens,
            spec.scale,
            cache.k_scale,
            cache.v_scale,
            spec.soft_cap or 0.0,
            *q.stride()[:2],
            *cache.key.stride()[:3],
            *cache.value.stride()[:3],
            *out.stride()[:2],
            batch.pages.table.stride(0),
            PAGE=cache.page_size,
            GROUP=self.group,
            D=spec.head_dim,
            D_PADDED=d_padded,
            BLOCK_Q=block_q,
            BLOCK_M=block_m,
            BLOCK_N=self._keys_per_tile(d_padded, few_queries, splits.count > 1),
            WINDOW=spec.window or 0,
            HAS_CAP=bool(spec.soft_cap),
            HAS_SINKS=sinks is not None,
            SPLIT=splits.count > 1,
            STAGES=3 if self.wide or (self.nvidia and few_queries) else 2,
            OVERLAP=self.overlap,
            AMD=takes_amd_assembly(self.nvidia),
            num_warps=block_m // 16 if self.wide and not few_queries else 4,
            **launch_options(self.overlap),
        )
