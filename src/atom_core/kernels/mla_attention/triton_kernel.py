"""Attention over latents in Triton: decode, speculative decoding and prompts in one launch.

A program takes some query tokens of one request, and as many of their heads as fit in a tile of rows. A tile of latents
is keys and values to all of them. The program reads the request's rows with an online softmax (arXiv 2205.14135). The
numbering of programs and the splits are those of :mod:`atom_core.kernels.attention.triton_kernel`, so a captured graph
can replay any lengths.

``H`` heads, ``HEADS`` of them in a tile; latents of rank ``L``, rotated keys of size ``R``; pages of any strides.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator

import torch
import triton
import triton.language as tl

from atom_core.batch import Batch, BatchShape
from atom_core.cache import LatentCacheView
from atom_core.kernels.attention.splits import SplitBuffers, count_splits
from atom_core.kernels.attention.triton_kernel import is_last, merged_splits
from atom_core.kernels.attention.triton_parts import LOG2_E, range_of
from atom_core.kernels.launch import entry_kernel
from atom_core.kernels.mla_attention.hopper import LatentDecode
from atom_core.kernels.mla_attention.spec import MlaAttentionSpec
from atom_core.kernels.triton_support import cdiv, launch_options, next_power_of_2, takes_amd_assembly
from atom_core.types import GraphSupport

#: One compiled kernel serves all values of these.
_VARYING = ["num_requests", "num_tokens"]


@entry_kernel
@triton.jit(do_not_specialize=_VARYING)
def _mla_attention(
    q,
    rows,
    out,
    partials,
    stats,
    arrivals,
    query_start_loc,
    seq_lens,
    page_table,
    num_requests,
    num_tokens,
    scale,
    cache_scale,
    stride_q_token,
    stride_q_head,
    stride_page,
    stride_row,
    stride_o_token,
    stride_o_head,
    stride_table,
    PAGE: tl.constexpr,
    H: tl.constexpr,
    HEADS: tl.constexpr,
    L: tl.constexpr,
    L_PADDED: tl.constexpr,
    R: tl.constexpr,
    R_PADDED: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLIT: tl.constexpr,
    STAGES: tl.constexpr,
    AHEAD: tl.constexpr,
    OVERLAP: tl.constexpr,
    AMD: tl.constexpr,
):
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    block = tl.program_id(0)
    split = tl.program_id(2)
    request = tl.cast(range_of(block, query_start_loc, num_requests, BLOCK_Q), tl.int64)
    start = tl.load(query_start_loc + request)
    num_queries = tl.load(query_start_loc + request + 1) - start
    first = (block - (start // BLOCK_Q + request).to(tl.int32)) * BLOCK_Q
    if first >= num_queries:
        return
    length = tl.load(seq_lens + request)

    # Row m of the tile is query token m // HEADS and head m % HEADS of this program's.
    tile_row = tl.arange(0, BLOCK_M)
    token = first + tile_row // HEADS
    head = tl.program_id(1) * HEADS + tile_row % HEADS
    row_used = (token < num_queries) & (tile_row < BLOCK_Q * HEADS) & (head < H)
    position = length - num_queries + token
    column = tl.arange(0, L_PADDED)
    column_used = column < L
    rope_dim = tl.arange(0, R_PADDED)
    rope_used = rope_dim < R
    query = q + (start + token).to(tl.int64)[:, None] * stride_q_token + head.to(tl.int64)[:, None] * stride_q_head
    plain_query = tl.load(query + column[None, :], mask=row_used[:, None] & column_used[None, :], other=0.0)
    rope_query = tl.load(query + L + rope_dim[None, :], mask=row_used[:, None] & rope_used[None, :], other=0.0)

    begin = 0
    end = length - num_queries + tl.minimum(first + BLOCK_Q, num_queries)
    working = 1
    if SPLIT:
        num_tiles = tl.cdiv(end, BLOCK_N)
        share = tl.cdiv(num_tiles, tl.num_programs(2))
        if not AMD:  # not measured on AMD
            # One program merges all splits, each as large as a tile of keys: no more splits than tiles in a split.
            share = tl.maximum(share, tl.ceil(tl.sqrt(num_tiles.to(tl.float32))).to(tl.int32))
        working = tl.cdiv(num_tiles, share)
        if split >= working:
            return
        begin = split * share * BLOCK_N
        end = tl.minimum(begin + share * BLOCK_N, end)

    highest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, L_PADDED], tl.float32)
    table = page_table + request * stride_table
    if AHEAD:
        # The pages of the next tile are loaded a tile ahead, so its rows can be loaded without a wait for them.
        ahead = begin + tl.arange(0, BLOCK_N)
        next_page = tl.load(table + ahead // PAGE, mask=ahead < end, other=0)
    for tile in tl.range(begin, end, BLOCK_N, num_stages=STAGES):
        other = tile + tl.arange(0, BLOCK_N)
        known = other < end
        if AHEAD:
            page = next_page
            ahead = other + BLOCK_N
            next_page = tl.load(table + ahead // PAGE, mask=ahead < end, other=0)
        else:
            page = tl.load(table + other // PAGE, mask=known, other=0)
        row = rows + (page.to(tl.int64) * stride_page + (other % PAGE).to(tl.int64) * stride_row)[:, None]
        latents = tl.load(row + column[None, :], mask=known[:, None] & column_used[None, :], other=0.0)
        keys = tl.load(row + L + rope_dim[None, :], mask=known[:, None] & rope_used[None, :], other=0.0)
        latents = latents.to(plain_query.dtype)
        scores = tl.dot(plain_query, tl.trans(latents), input_precision="ieee")
        scores = tl.dot(rope_query, tl.trans(keys.to(plain_query.dtype)), scores, input_precision="ieee")
        scores *= scale * cache_scale * LOG2_E
        seen = (other[None, :] <= position[:, None]) & known[None, :]
        scores = tl.where(seen, scores, float("-inf"))
        new_highest = tl.maximum(highest, tl.max(scores, 1))
        # A query may see no row of this split: keep exp2() away from inf - inf.
        base = tl.where(new_highest == float("-inf"), 0.0, new_highest)
        weights = tl.exp2(scores - base[:, None])
        shrink = tl.exp2(highest - base)
        total = total * shrink + tl.sum(weights, 1)
        acc = tl.dot(weights.to(latents.dtype), latents, acc * shrink[:, None], input_precision="ieee")
        highest = new_highest

    mask = row_used[:, None] & column_used[None, :]
    if SPLIT:  # noqa: SIM102 - constexpr, unlike the next
        if working > 1:
            # Rows of partial results: split, token, head.
            at = (start + token).to(tl.int64) * H + head
            split_rows = tl.cast(num_tokens, tl.int64) * H
            mine = split * split_rows + at
            tl.store(partials + mine[:, None] * L + column[None, :], acc, mask=mask)
            tl.store(stats + mine * 2, highest, mask=row_used)
            tl.store(stats + mine * 2 + 1, total, mask=row_used)
            if not is_last(arrivals + block * tl.num_programs(1) + tl.program_id(1), working, AMD):
                return
            total, acc = merged_splits(partials, stats, at, split_rows, working, row_used, L, BLOCK_M, L_PADDED)

    acc = acc * cache_scale / tl.where(total == 0.0, 1.0, total)[:, None]
    o_at = (start + token).to(tl.int64)[:, None] * stride_o_token + head.to(tl.int64)[:, None] * stride_o_head
    tl.store(out + o_at + column[None, :], acc.to(out.dtype.element_ty), mask=mask)


class TritonMlaAttention:
    """See :mod:`atom_core.kernels.mla_attention`.

    Args:
        spec: the layer.
        nvidia: whether the GPU is NVIDIA's; AMD's have less shared memory.
        overlap: see :func:`atom_core.kernels.triton_support.overlaps`; true from Hopper on.
        foreign: see :func:`atom_core.kernels.cache_dtypes.is_foreign`.
        hopper: whether the GPU is a Hopper, which has its own decode kernel.
    """

    graph_support: GraphSupport = "always"

    def __init__(
        self, spec: MlaAttentionSpec, nvidia: bool, overlap: bool, foreign: bool = False, hopper: bool = False
    ) -> None:
        self.spec, self.foreign = spec, foreign
        self.decode = LatentDecode(spec, overlap) if hopper and LatentDecode.fits(spec) else None
        self.padded_heads = spec.latent.num_heads
        self.nvidia, self.overlap = nvidia, overlap
        #: Rows of the largest tile: its accumulator, as wide as a latent, has to fit in registers.
        self.max_rows = (64 if nvidia else 32) // (2 if spec.latent.dtype == torch.float32 else 1)
        self.heads: int = min(spec.latent.num_heads, self.max_rows)
        self.decode_rows: int = max(16, next_power_of_2(self.heads))  # tl.dot wants at least 16
        self.split_buffers = SplitBuffers()

    def _tile(self, rows: int) -> tuple[int, int, int]:
        """Keys, warps and stages for ``rows`` rows.

        On NVIDIA 4 warps have the registers for 16 rows of 16 bits, and two such programs share a multiprocessor. More
        rows need 8 warps; with up to 32 rows, three stages fit in Hopper's 227 KiB of shared memory. gfx942 has 64 KiB,
        and needs registers to widen a foreign FP8 dtype: with more keys or warps it spills.
        """
        shape = self.spec.latent
        if self.nvidia and shape.dtype.itemsize == shape.cache_dtype.itemsize == 2:
            if rows <= 16:
                return 32, 4, 3
            if rows <= 32 and self.overlap:
                return 64, 8, 3
        keys = 64 if self.nvidia else 16 if self.foreign else 32
        keys = max(16, keys // (2 if shape.dtype == torch.float32 else 1))  # tl.dot wants at least 16
        return (keys, 8, 2) if self.nvidia else (keys, 4, 1)

    def attention_compile_keys(self, shape: BatchShape, device: torch.device) -> Iterator[Hashable]:
        """See :class:`atom_core.kernels.compile_keys.AttentionCompileKeys`."""
        if self.decode is not None and self.decode.takes_shape(shape):
            yield from self.decode.attention_compile_keys(shape, device)
            return
        block_m, blocks, groups = self._programs(shape.max_query_len, shape.num_tokens, shape.num_requests)
        yield block_m, count_splits(blocks * groups, shape.max_seq_len, device) > 1

    def _programs(self, max_query_len: int, num_tokens: int, num_requests: int) -> tuple[int, int, int]:
        """Rows of a tile, programs for all tokens, and for all heads."""
        few_queries = max_query_len * self.heads <= self.decode_rows
        block_m = self.decode_rows if few_queries else max(self.decode_rows, self.max_rows)
        blocks = num_tokens // max(1, block_m // self.heads) + num_requests
        return block_m, blocks, cdiv(self.spec.latent.num_heads, self.heads)

    def __call__(self, q: torch.Tensor, cache: LatentCacheView, batch: Batch, out: torch.Tensor) -> None:
        """Write the attention of every request's queries to ``out``."""
        shape = self.spec.latent
        assert q.stride(-1) == cache.rows.stride(-1) == out.stride(-1) == 1
        if self.decode is not None and self.decode.takes(cache, batch):
            self.decode(q, cache, batch, out)
            return
        num_tokens, num_requests = q.shape[0], batch.seq_lens.shape[0]
        block_m, blocks, groups = self._programs(batch.max_query_len, num_tokens, num_requests)
        row_count = num_tokens * shape.num_heads
        keys, warps, stages = self._tile(block_m)
        splits = self.split_buffers.share(blocks * groups, batch.max_seq_len, row_count, shape.rank, q.device)
        _mla_attention[blocks, groups, splits.count](
            q,
            cache.rows,
            out,
            splits.partials,
            splits.stats,
            splits.arrivals,
            batch.query_start_loc,
            batch.seq_lens,
            batch.pages.table,
            num_requests,
            num_tokens,
            self.spec.scale,
            cache.scale,
            *q.stride()[:2],
            *cache.rows.stride()[:2],
            *out.stride()[:2],
            batch.pages.table.stride(0),
            PAGE=cache.page_size,
            H=shape.num_heads,
            HEADS=self.heads,
            L=shape.rank,
            L_PADDED=max(16, next_power_of_2(shape.rank)),
            R=shape.rope_dim,
            R_PADDED=max(16, next_power_of_2(shape.rope_dim)),
            BLOCK_Q=max(1, block_m // self.heads),
            BLOCK_M=block_m,
            BLOCK_N=keys,
            SPLIT=splits.count > 1,
            STAGES=stages,
            AHEAD=stages > 2,  # with fewer stages it spills registers
            OVERLAP=self.overlap,
            AMD=takes_amd_assembly(self.nvidia),
            num_warps=warps,
            **launch_options(self.overlap),
        )
