"""MLA decode of the only token of the only request on Hopper, in Gluon: each program absorbs its head's query itself.

A program takes a head and a tile of rows. The head's key projection and the tile are copied to shared memory before the
kernel before it has ended: earlier steps wrote all rows but the token's own. The token's own key is in no tile: it is
normed and rotated in registers, and joins the last tile. Each tile is a split, and its partial result is stored. If
there are too many tiles, one program a head stores the absorbed query instead, for
:mod:`atom_core.kernels.mla_attention.hopper`. A captured graph has both launches, and the request's length determines
which of them does the work.

``wgmma`` needs eight columns at least; the head's query is the first.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from atom_core.batch import Batch, BatchShape
from atom_core.cache import LatentCacheView
from atom_core.kernels.attention.hopper_parts import partners
from atom_core.kernels.attention.splits import Splits, empty_partials
from atom_core.kernels.attention.triton_parts import LOG2_E
from atom_core.kernels.eviction import EVICT_LAST
from atom_core.kernels.launch import entry_kernel
from atom_core.kernels.linear.few_rows_hopper import barrier, depend, load, ready
from atom_core.kernels.mla_absorbed_values.triton_kernel import merged_values
from atom_core.kernels.mla_attention.hopper import KEYS, LatentDecode, copy_rows, pages_of
from atom_core.kernels.mla_attention.spec import MlaAttentionSpec
from atom_core.kernels.mla_cache import MlaWeights
from atom_core.kernels.triton_support import launch_options

#: Programs that run at once, one on each multiprocessor, and the most and fewest tiles with a program each. A program
#: reads a head's weight. With more tiles, or too many heads for the fewest, one program a head absorbs the query.
_PROGRAMS, _MAX_TILES, _MIN_TILES = 132, 6, 3
#: Columns of a product: the minimum of ``wgmma``.
_COLUMNS = 8
#: Tiles of shared memory for a head's weight, whose rows are as wide as a latent.
_WEIGHT_TILES = 2


@gluon.jit
def _rotated(source, dim, partner, is_first, cos, sin):
    """The elements at ``source``, rotated and rounded to their dtype, in float32."""
    one = gl.load(source + dim).to(gl.float32)
    other = gl.load(source + partner).to(gl.float32)
    rotated = one * cos + gl.where(is_first, -other, other) * sin
    return rotated.to(source.dtype.element_ty).to(gl.float32)


@gluon.jit
def _first_column(of_columns, layout: gl.constexpr):
    """The first column of ``of_columns [rows, columns]``, which has this layout."""
    column = gl.arange(0, of_columns.shape[1], gl.SliceLayout(0, layout))
    return gl.sum(gl.where((column == 0)[None, :], of_columns, 0.0), 1)


@entry_kernel
@gluon.jit(do_not_specialize=["max_tiles"])
def mla_fused_decode_hopper(
    q,
    latent,
    positions,
    slots,
    cos_sin,
    norm,
    expand,
    rows,
    queries,
    partials,
    stats,
    seq_lens,
    page_table,
    max_tiles,
    eps,
    scale,
    stride_q_head,
    stride_expand_head,
    stride_expand,
    stride_page,
    stride_row,
    stride_o_head,
    PAGE: gl.constexpr,
    H: gl.constexpr,
    N: gl.constexpr,
    R: gl.constexpr,
    L: gl.constexpr,
    COLUMNS: gl.constexpr,
    KEYS: gl.constexpr,
    WEIGHT_TILES: gl.constexpr,
    INTERLEAVED: gl.constexpr,
    OVERLAP: gl.constexpr,
):
    """A head and one of up to ``max_tiles`` tiles: its partial result, or the absorbed query if there are more."""
    dtype: gl.constexpr = rows.dtype.element_ty
    warps: gl.constexpr = gl.num_warps()
    copied: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [warps, 1], [1, 0])
    scored: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    summed: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, COLUMNS, 16])
    of_scores: gl.constexpr = gl.SliceLayout(0, scored)
    of_latent: gl.constexpr = gl.SliceLayout(1, summed)
    of_rope: gl.constexpr = gl.SliceLayout(0, copied)
    if OVERLAP:
        depend("griddepcontrol.launch_dependents; // $0")
    head = gl.program_id(0)
    tile = gl.program_id(1)
    length = gl.load(seq_lens)
    tiles = gl.cdiv(length, KEYS)
    few = tiles <= max_tiles
    if tile >= gl.where(few, tiles, 1):
        # One idle program still waits, so that a wait for this kernel is also a wait for the kernels before it.
        if OVERLAP and head + tile == 0:
            depend("griddepcontrol.wait; // $0")
        return

    latents = gl.allocate_shared_memory(
        dtype, [1 + WEIGHT_TILES, KEYS, L], gl.NVMMASharedLayout.get_default_for([KEYS, L], dtype)
    )
    keys = gl.allocate_shared_memory(dtype, [KEYS, R], gl.NVMMASharedLayout.get_default_for([KEYS, R], dtype))
    absorbed_queries = gl.allocate_shared_memory(
        dtype, [COLUMNS, L], gl.NVMMASharedLayout.get_default_for([COLUMNS, L], dtype)
    )
    rope_q = gl.allocate_shared_memory(dtype, [COLUMNS, R], gl.NVMMASharedLayout.get_default_for([COLUMNS, R], dtype))
    nope_queries = gl.allocate_shared_memory(
        dtype, [WEIGHT_TILES, COLUMNS, KEYS], gl.NVMMASharedLayout.get_default_for([COLUMNS, KEYS], dtype)
    )
    lane = gl.arange(0, KEYS, gl.SliceLayout(1, copied))
    weight = expand + head.to(gl.int64) * stride_expand_head + gl.arange(0, L, gl.SliceLayout(0, copied))[None, :]
    for block in gl.static_range(WEIGHT_TILES):
        taken = block * KEYS + lane
        load(latents.index(1 + block), weight + taken.to(gl.int64)[:, None] * stride_expand, mask=(taken < N)[:, None])
    # The token's own row is not read: this kernel writes it.
    end = length - 1
    if few:
        key = tile * KEYS + lane
        page = pages_of(page_table, key, end, PAGE)
        copy_rows(latents.index(0), keys, rows, key, page, end, stride_page, stride_row, L, R, PAGE)
    async_copy.commit_group()
    # These are loaded before the wait, as no kernel of this package writes them.
    rope_dim, pair, partner, is_first = partners(R, R, INTERLEAVED, of_rope)
    angles = cos_sin + gl.load(positions).to(gl.int64) * R + pair
    cos = gl.load(angles)
    sin = gl.load(angles + R // 2)
    slot = gl.load(slots)
    latent_dim = gl.arange(0, L, of_latent)
    factors = gl.load(norm + latent_dim).to(gl.float32)
    if OVERLAP:
        depend("griddepcontrol.wait; // $0")

    query = q + head.to(gl.int64) * stride_q_head
    each = gl.arange(0, KEYS, gl.SliceLayout(0, copied))
    is_query = (gl.arange(0, COLUMNS, gl.SliceLayout(1, copied)) == 0)[:, None]
    for block in gl.static_range(WEIGHT_TILES):
        wanted = block * KEYS + each
        numbers = gl.load(query + wanted, mask=wanted < N, other=0.0)
        nope_queries.index(block).store(gl.where(is_query, numbers[None, :], 0.0).to(dtype))
    rope_query = _rotated(query + N, rope_dim, partner, is_first, cos, sin)
    rope_q.store(gl.where(is_query, rope_query[None, :], 0.0).to(dtype))
    # The token's own row, rounded as in the cache.
    raw = gl.load(latent + latent_dim).to(gl.float32)
    own = (raw * (1.0 / gl.sqrt(gl.sum(raw * raw, 0) / L + eps)) * factors).to(dtype).to(gl.float32)
    rope_own = _rotated(latent + L, rope_dim, partner, is_first, cos, sin)
    if (head + tile == 0) & (slot >= 0):
        row = rows + slot.to(gl.int64) // PAGE * stride_page + slot.to(gl.int64) % PAGE * stride_row
        gl.store(row + latent_dim, own.to(dtype))
        gl.store(row + L + rope_dim, rope_own.to(dtype))

    ready(0)
    absorbed = gl.zeros([L, COLUMNS], gl.float32, summed)
    for block in gl.static_range(WEIGHT_TILES):
        absorbed = warpgroup_mma(
            latents.index(1 + block).permute((1, 0)), nope_queries.index(block).permute((1, 0)), absorbed, is_async=True
        )
    absorbed = warpgroup_mma_wait(0, [absorbed]).to(dtype)
    if not few:
        target = queries + head.to(gl.int64) * stride_o_head
        gl.store(
            target + latent_dim, _first_column(absorbed.to(gl.float32), summed).to(dtype), eviction_policy=EVICT_LAST
        )
        gl.store(target + L + rope_dim, rope_query.to(dtype), eviction_policy=EVICT_LAST)
        return
    absorbed_queries.store(absorbed.permute((1, 0)))
    own_score = gl.sum(absorbed.to(gl.float32) * own[:, None], 0) + gl.sum(rope_query * rope_own, 0)
    own_score = gl.convert_layout(own_score, of_scores) * (scale * LOG2_E)
    fence_async_shared()
    barrier()

    scores = gl.zeros([KEYS, COLUMNS], gl.float32, scored)
    scores = warpgroup_mma(latents.index(0), absorbed_queries.permute((1, 0)), scores, use_acc=False, is_async=True)
    scores = warpgroup_mma(keys, rope_q.permute((1, 0)), scores, is_async=True)
    scores = warpgroup_mma_wait(0, [scores])
    of_tile = tile * KEYS + gl.arange(0, KEYS, gl.SliceLayout(1, scored))
    scores = gl.where((of_tile < end)[:, None], scores * (scale * LOG2_E), float("-inf"))
    own_score = gl.where(tile == tiles - 1, own_score, float("-inf"))
    highest = gl.maximum(gl.max(scores, 0), own_score)
    scores = gl.exp2(scores - highest[None, :])
    own_share = gl.exp2(own_score - highest)
    total = gl.sum(scores, 0) + own_share
    nope_queries.index(0).store(scores.to(dtype).permute((1, 0)))
    fence_async_shared()
    barrier()
    acc = own[:, None] * gl.convert_layout(own_share, gl.SliceLayout(0, summed))[None, :]
    acc = warpgroup_mma(latents.index(0).permute((1, 0)), nope_queries.index(0).permute((1, 0)), acc, is_async=True)
    acc = warpgroup_mma_wait(0, [acc])
    mine = tile.to(gl.int64) * H + head
    gl.store(partials + mine * L + latent_dim, _first_column(acc, summed), eviction_policy=EVICT_LAST)
    column = gl.arange(0, COLUMNS, of_scores)
    stats_at = stats + mine * 2 + column * 0
    gl.store(stats_at, highest, mask=column == 0, eviction_policy=EVICT_LAST)
    gl.store(stats_at + 1, total, mask=column == 0, eviction_policy=EVICT_LAST)


class MlaFusedDecode:
    """See the module; ``overlap``: see :func:`atom_core.kernels.triton_support.overlaps`."""

    def __init__(self, spec: MlaAttentionSpec, overlap: bool) -> None:
        self.spec = spec
        self.decode = LatentDecode(spec, overlap)
        self.overlap = overlap
        tiles = min(_MAX_TILES, _PROGRAMS // spec.latent.num_heads)
        #: The most tiles with a program each.
        self.max_tiles = tiles if tiles >= _MIN_TILES else 0

    @staticmethod
    def fits(spec: MlaAttentionSpec) -> bool:
        """Whether the kernel supports a layer, on Hopper."""
        return LatentDecode.fits(spec) and spec.latent.nope_dim <= _WEIGHT_TILES * KEYS

    def takes(self, num_tokens: int, cache: LatentCacheView, batch: Batch) -> bool:
        """See :class:`atom_core.kernels.mla_fused_decode.MlaFusedDecodeKernel`."""
        one_token = num_tokens == len(batch.seq_lens) == 1
        return one_token and self.decode.takes(cache, batch) and self.decode.max_splits(batch) > 1

    def takes_shape(self, shape: BatchShape, device: torch.device) -> bool:
        """See :class:`atom_core.kernels.mla_fused_decode.MlaFusedDecodeKernel`; all that it takes is compiled once."""
        return shape.num_tokens == shape.num_requests == 1 and self.decode.max_splits_of(shape, device) > 1

    def __call__(
        self,
        q: torch.Tensor,
        latent: torch.Tensor,
        positions: torch.Tensor,
        weights: MlaWeights,
        cache: LatentCacheView,
        slots: torch.Tensor,
        batch: Batch,
        out: torch.Tensor,
    ) -> None:
        """Launch the three kernels."""
        shape, count = self.spec.latent, self.decode.max_splits(batch)
        assert q.stride(-1) == latent.stride(-1) == cache.rows.stride(-1) == weights.expand.stride(-1) == 1
        partials, stats = empty_partials(count, shape.num_heads, shape.rank, q.device)
        absorbed = q.new_empty(1, shape.num_heads, shape.row)
        max_tiles = min(count, self.max_tiles)  # each tile is a split
        mla_fused_decode_hopper[shape.num_heads, max(1, max_tiles)](
            q,
            latent,
            positions,
            slots,
            weights.cos_sin,
            weights.norm,
            weights.expand,
            cache.rows,
            absorbed,
            partials,
            stats,
            batch.seq_lens,
            batch.pages.table,
            max_tiles,
            weights.eps,
            self.spec.scale,
            q.stride(1),
            *weights.expand.stride()[:2],
            *cache.rows.stride()[:2],
            absorbed.stride(1),
            PAGE=cache.page_size,
            H=shape.num_heads,
            N=shape.nope_dim,
            R=shape.rope_dim,
            L=shape.rank,
            COLUMNS=_COLUMNS,
            KEYS=KEYS,
            WEIGHT_TILES=_WEIGHT_TILES,
            INTERLEAVED=shape.interleaved,
            OVERLAP=self.overlap,
            num_warps=4,
            **launch_options(self.overlap),
        )
        self.decode.launch(absorbed, cache, batch, None, Splits(count, partials, stats), 1, done_tiles=max_tiles)
        into = weights.expand[:, shape.nope_dim :].transpose(1, 2)
        merged_values(partials, stats, batch, into, out, overlap=self.overlap)
