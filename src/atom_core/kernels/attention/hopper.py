"""Paged attention of prompts on Hopper, in Gluon: the softmax of a tile of keys runs during the product before it.

A program takes ``BLOCK_Q`` query tokens of one request and all query heads of one key/value head, as
:mod:`atom_core.kernels.attention.triton_kernel` does, in tiles of 64 rows a warp group. It starts the product of the
queries and the next tile of keys, then that of the current tile's weights and values, and works out the next tile's
weights while the tensor cores are busy with the second (arXiv 2407.08608, section 3.2). The tiles after those are
copied meanwhile; ``wgmma`` reads them, and the queries, from shared memory.

Most tiles of keys are seen by all queries of a program and need no masks; those at the diagonal, and at a window's
edge, have loops of their own. The programs with the most keys, of the last queries of a prompt, start first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from atom_core.batch import Batch, BatchShape
from atom_core.cache import KVCacheView
from atom_core.kernels.attention.hopper_parts import (
    aligned,
    capped,
    copied_layout,
    copy_tile,
    pages_of_runs,
    run_of,
    runs_layout,
    to_base_2,
)
from atom_core.kernels.attention.triton_parts import LOG2_E, range_of
from atom_core.kernels.launch import entry_kernel
from atom_core.kernels.linear.few_rows_hopper import barrier, depend, load, ready
from atom_core.kernels.linear.tiles import why_no_gluon
from atom_core.kernels.triton_support import launch_options, multiprocessors

if TYPE_CHECKING:
    from atom_core.kernels.attention import PagedAttentionSpec


class Tile(NamedTuple):
    """Rows and keys of a program's tile."""

    rows: int
    keys: int


#: The tiles of each head size: the small one, and a larger one for what :meth:`PromptAttention.tile` says. Two tiles of
#: keys and of values fit in shared memory beside the queries, and a tile's scores and weights in registers beside the
#: outputs.
_TILES = {64: (Tile(64, 64), Tile(64, 128)), 128: (Tile(64, 64), Tile(128, 128)), 256: (Tile(64, 64), Tile(128, 64))}

#: Keys of a query from which tiles of two warp groups are faster with heads of 128; with 2,048 both are as fast.
_MANY_KEYS = 4096

_range_of = gluon.jit(range_of.fn)


@gluon.jit
def _weights(
    scores,
    highest,
    total,
    tile,
    position,
    scale,
    soft_cap,
    MASKED: gl.constexpr,
    WINDOW: gl.constexpr,
    HAS_CAP: gl.constexpr,
    scored: gl.constexpr,
):
    """The weights of a tile of keys, the running maximum and sum with them, and what earlier weights shrink by."""
    BLOCK_N: gl.constexpr = scores.shape[1]
    if HAS_CAP:
        scores = capped(scores, scale, soft_cap)
    if MASKED:
        # A row with a query sees no key past its request's length.
        other = (tile + gl.arange(0, BLOCK_N, gl.SliceLayout(0, scored)))[None, :]
        seen = other <= position[:, None]
        if WINDOW > 0:
            seen = seen & (other > position[:, None] - WINDOW)
        scores = gl.where(seen, scores, float("-inf"))
    # Scores are scaled and their maximum subtracted in one instruction.
    factor = scale
    if HAS_CAP:
        factor = 1.0
    new_highest = gl.maximum(highest, gl.max(scores, 1) * factor)
    base = new_highest
    if MASKED and WINDOW > 0:
        # A row may have seen no key yet (its window starts later): keep exp2() away from inf - inf.
        base = gl.where(new_highest == float("-inf"), 0.0, new_highest)
    weights = gl.exp2(scores * factor - base[:, None])
    shrink = gl.exp2(highest - base)
    return weights, new_highest, total * shrink + gl.sum(weights, 1), shrink


@gluon.jit
def _over_tiles(
    acc,
    weights,
    highest,
    total,
    place,
    first,
    last,
    queries,
    keys,
    values,
    done,
    key,
    value,
    table,
    earliest,
    length,
    position,
    scale,
    soft_cap,
    stride_k_page,
    stride_k_token,
    stride_v_page,
    stride_v_token,
    PAGE: gl.constexpr,
    RUN: gl.constexpr,
    MASKED: gl.constexpr,
    WINDOW: gl.constexpr,
    HAS_CAP: gl.constexpr,
    runs: gl.constexpr,
    copied: gl.constexpr,
    scored: gl.constexpr,
    summed: gl.constexpr,
    weighed: gl.constexpr,
):
    """Weigh the tiles of keys from ``first`` on to before ``last``, and add each time the tile before to ``acc``.

    ``place`` has the buffers of the tile before: its values are being copied there, and the keys after them to the
    other. Of both, this leaves the same for the last tile.
    """
    BLOCK_M: gl.constexpr = queries.shape[0]
    BLOCK_N: gl.constexpr = keys.shape[1]
    for tile in range(first, last, BLOCK_N):
        ready(0)
        scores = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, scored)
        scores = warpgroup_mma(queries, keys.index(1 - place).permute((1, 0)), scores, use_acc=False, is_async=True)
        # Where a copy starts, Triton has all warps wait until they have started, or ended, what reads such memory.
        page = pages_of_runs(table, tile, length, BLOCK_N, PAGE, RUN, runs)
        copy_tile(
            values.index(1 - place), value, page, tile, earliest, length, stride_v_page, stride_v_token, PAGE, RUN,
            WINDOW, runs, copied,
        )  # fmt: skip
        acc = warpgroup_mma(weights, values.index(place), acc, is_async=True)
        page = pages_of_runs(table, tile + BLOCK_N, length, BLOCK_N, PAGE, RUN, runs)
        scores = warpgroup_mma_wait(1, [scores])
        copy_tile(
            keys.index(place), key, page, tile + BLOCK_N, earliest, length, stride_k_page, stride_k_token, PAGE, RUN,
            WINDOW, runs, copied,
        )  # fmt: skip
        async_copy.commit_group()
        new_weights, highest, total, shrink = _weights(
            scores, highest, total, tile, position, scale, soft_cap, MASKED, WINDOW, HAS_CAP, scored
        )
        new_weights = gl.convert_layout(new_weights.to(weights.dtype), weighed)
        # Without a store of what was worked out, ptxas moves the wait up.
        done.store(total)
        # The product reads the weights before from registers, which are theirs until it has ended.
        acc, weights = warpgroup_mma_wait(0, [acc, weights])
        acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, summed))[:, None]
        weights = new_weights
        place = 1 - place
    return acc, weights, highest, total, place


@entry_kernel
@gluon.jit(do_not_specialize=["num_requests"])
def prompt_attention_hopper(
    q,
    key,
    value,
    out,
    sinks,
    query_start_loc,
    seq_lens,
    page_table,
    num_requests,
    scale,
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
    PAGE: gl.constexpr,
    KV_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    D: gl.constexpr,
    BLOCK_Q: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    WINDOW: gl.constexpr,
    HAS_CAP: gl.constexpr,
    OVERLAP: gl.constexpr,
):
    """See the module. ``scale`` and ``soft_cap`` are for logits to the base 2; see :func:`_weights`."""
    if OVERLAP:
        depend("griddepcontrol.launch_dependents; // $0")
        depend("griddepcontrol.wait; // $0")
    dtype: gl.constexpr = key.dtype.element_ty
    warps: gl.constexpr = BLOCK_M // 16
    copied: gl.constexpr = copied_layout(D, warps)
    RUN: gl.constexpr = run_of(PAGE, BLOCK_N, D, warps)
    runs: gl.constexpr = runs_layout(RUN, D, warps)
    scored: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, BLOCK_N, 16])
    summed: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, D, 16])
    weighed: gl.constexpr = gl.DotOperandLayout(0, summed, 2)

    program = gl.num_programs(0) - 1 - gl.program_id(0)
    block = program // KV_HEADS
    kv_head = (program % KV_HEADS).to(gl.int64)
    request = _range_of(block, query_start_loc, num_requests, BLOCK_Q)
    start = gl.load(query_start_loc + request)
    num_queries = gl.load(query_start_loc + request + 1) - start
    first = (block - (start // BLOCK_Q + request)) * BLOCK_Q
    if first >= num_queries:
        return
    length = gl.load(seq_lens + request)

    queries = gl.allocate_shared_memory(dtype, [BLOCK_M, D], gl.NVMMASharedLayout.get_default_for([BLOCK_M, D], dtype))
    keys = gl.allocate_shared_memory(dtype, [2, BLOCK_N, D], gl.NVMMASharedLayout.get_default_for([BLOCK_N, D], dtype))
    values = gl.allocate_shared_memory(
        dtype, [2, BLOCK_N, D], gl.NVMMASharedLayout.get_default_for([BLOCK_N, D], dtype)
    )
    done = gl.allocate_shared_memory(gl.float32, [BLOCK_M], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    # Row m of the tile is query token m // GROUP and the group's head m % GROUP.
    row = gl.arange(0, BLOCK_M, gl.SliceLayout(1, copied))
    token = first + row // GROUP
    used = ((token < num_queries) & (row < BLOCK_Q * GROUP))[:, None]
    dim = gl.arange(0, D, gl.SliceLayout(0, copied))[None, :]
    head = kv_head * GROUP + row % GROUP
    source = q + ((start + token).to(gl.int64) * stride_q_token + head * stride_q_head)[:, None]
    load(queries, source + dim, mask=used)

    # Whole tiles of keys that every query of the program sees are those from `whole` to `tail`.
    first_position = length - num_queries + first
    end = length - num_queries + gl.minimum(first + BLOCK_Q, num_queries)
    begin = first * 0
    whole = first * 0
    earliest = first_position - WINDOW + 1
    if WINDOW > 0:
        begin = gl.maximum(earliest, 0) // BLOCK_N * BLOCK_N
        whole = gl.cdiv(gl.maximum(end - WINDOW, 0), BLOCK_N) * BLOCK_N
    tail = (first_position + 1) // BLOCK_N * BLOCK_N

    key += kv_head * stride_k_head
    value += kv_head * stride_v_head
    table = page_table + request.to(gl.int64) * stride_table
    page = pages_of_runs(table, begin, length, BLOCK_N, PAGE, RUN, runs)
    copy_tile(
        keys.index(0), key, page, begin, earliest, length, stride_k_page, stride_k_token, PAGE, RUN, WINDOW, runs,
        copied,
    )  # fmt: skip
    async_copy.commit_group()
    copy_tile(
        values.index(0), value, page, begin, earliest, length, stride_v_page, stride_v_token, PAGE, RUN, WINDOW, runs,
        copied,
    )  # fmt: skip
    page = pages_of_runs(table, begin + BLOCK_N, length, BLOCK_N, PAGE, RUN, runs)
    copy_tile(
        keys.index(1), key, page, begin + BLOCK_N, earliest, length, stride_k_page, stride_k_token, PAGE, RUN, WINDOW,
        runs, copied,
    )  # fmt: skip
    async_copy.commit_group()

    of_row: gl.constexpr = gl.SliceLayout(1, scored)
    row = gl.arange(0, BLOCK_M, of_row)
    position = first_position + row // GROUP
    highest = gl.full([BLOCK_M], float("-inf"), gl.float32, of_row)
    total = gl.zeros([BLOCK_M], gl.float32, of_row)
    if sinks is not None:
        # The sink is a key without a value: its logit starts the running softmax.
        highest = gl.load(sinks + kv_head * GROUP + row % GROUP).to(gl.float32) * LOG2_E
        total += 1.0
    acc = gl.zeros([BLOCK_M, D], gl.float32, summed)

    ready(1)
    scores = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, scored)
    scores = warpgroup_mma(queries, keys.index(0).permute((1, 0)), scores, use_acc=False, is_async=True)
    scores = warpgroup_mma_wait(0, [scores])
    weights, highest, total, _ = _weights(
        scores, highest, total, begin, position, scale, soft_cap, True, WINDOW, HAS_CAP, scored
    )
    weights = gl.convert_layout(weights.to(dtype), weighed)
    place = first * 0
    # Tiles at the window's edge, those that every query sees, and those at the diagonal.
    tile = begin + BLOCK_N
    edge = gl.maximum(gl.minimum(whole, end), tile)
    whole = gl.maximum(tile, whole) if WINDOW > 0 else tile
    tail = gl.maximum(tail, whole)
    firsts = (tile, whole, tail)
    lasts = (edge, tail, end)
    for part in gl.static_range(0 if WINDOW > 0 else 1, 3):
        acc, weights, highest, total, place = _over_tiles(
            acc,
            weights,
            highest,
            total,
            place,
            firsts[part],
            lasts[part],
            queries,
            keys,
            values,
            done,
            key,
            value,
            table,
            earliest,
            length,
            position,
            scale,
            soft_cap,
            stride_k_page,
            stride_k_token,
            stride_v_page,
            stride_v_token,
            PAGE,
            RUN,
            part != 1,
            WINDOW,
            HAS_CAP,
            runs,
            copied,
            scored,
            summed,
            weighed,
        )
    ready(0)
    acc = warpgroup_mma(weights, values.index(place), acc, is_async=True)
    acc, weights = warpgroup_mma_wait(0, [acc, weights])

    # A row without a query may have seen no key, and a request's queries have.
    acc = acc / gl.convert_layout(gl.where(total == 0.0, 1.0, total), gl.SliceLayout(1, summed))[:, None]
    # Through the queries' shared memory, so that threads next to each other store what is next to each other.
    queries.store(acc.to(dtype))
    barrier()
    to = out + ((start + token).to(gl.int64) * stride_o_token + head * stride_o_head)[:, None]
    gl.store(to + dim, queries.load(copied), mask=used)


class PromptAttention:
    """See the module; ``overlap``: see :func:`atom_core.kernels.triton_support.overlaps`."""

    def __init__(self, spec: PagedAttentionSpec, overlap: bool) -> None:
        self.spec, self.overlap = spec, overlap
        self.group: int = spec.num_heads // spec.num_kv_heads

    @staticmethod
    def fits(spec: PagedAttentionSpec) -> bool:
        """Whether the kernel supports a layer, on Hopper."""
        sizes = spec.head_dim in _TILES and spec.num_heads // spec.num_kv_heads <= 64 and spec.scale > 0.0
        return sizes and spec.dtype.itemsize == 2 and spec.cache_dtype == spec.dtype and why_no_gluon() is None

    @staticmethod
    def takes(q: torch.Tensor, cache: KVCacheView, out: torch.Tensor) -> bool:
        """Whether rows are aligned to 16 bytes, as Triton knows of arguments that are multiples of 16."""
        return aligned(cache, q, out)

    def tile(self, batch: BatchShape | Batch, device: torch.device) -> Tile:
        """The tile of a launch; it is its compile key, too.

        Every choice is correct for every batch, so a captured graph can replay other ones. Which is faster was measured
        on an H200. With heads of 64, the larger one wins where cached tokens outnumber the new ones. With larger heads,
        it has two warp groups and must not leave multiprocessors idle; heads of 128 want many keys besides.
        """
        small, large = _TILES[self.spec.head_dim]
        keys = min(batch.max_seq_len, self.spec.window or batch.max_seq_len)
        if self.spec.head_dim == 64:
            return large if keys > 2 * batch.max_query_len else small
        if self.spec.head_dim == 128 and keys < _MANY_KEYS:
            return small
        programs = self._programs(large, batch.num_tokens, batch.num_requests)
        return large if programs >= multiprocessors(device) else small

    def _programs(self, tile: Tile, num_tokens: int, num_requests: int) -> int:
        return (num_tokens // (tile.rows // self.group) + num_requests) * self.spec.num_kv_heads

    def __call__(
        self, q: torch.Tensor, cache: KVCacheView, batch: Batch, sinks: torch.Tensor | None, out: torch.Tensor
    ) -> None:
        """As :meth:`atom_core.kernels.attention.triton_kernel.TritonAttention.__call__`."""
        spec, num_requests = self.spec, batch.seq_lens.shape[0]
        tile = self.tile(batch, q.device)
        scale, soft_cap = to_base_2(spec)
        prompt_attention_hopper[(self._programs(tile, q.shape[0], num_requests),)](
            q,
            cache.key,
            cache.value,
            out,
            sinks,
            batch.query_start_loc,
            batch.seq_lens,
            batch.pages.table,
            num_requests,
            scale,
            soft_cap,
            *q.stride()[:2],
            *cache.key.stride()[:3],
            *cache.value.stride()[:3],
            *out.stride()[:2],
            batch.pages.table.stride(0),
            PAGE=cache.page_size,
            KV_HEADS=spec.num_kv_heads,
            GROUP=self.group,
            D=spec.head_dim,
            BLOCK_Q=tile.rows // self.group,
            BLOCK_M=tile.rows,
            BLOCK_N=tile.keys,
            WINDOW=spec.window or 0,
            HAS_CAP=bool(spec.soft_cap),
            OVERLAP=self.overlap,
            num_warps=tile.rows // 16,
            **launch_options(self.overlap),
        )
