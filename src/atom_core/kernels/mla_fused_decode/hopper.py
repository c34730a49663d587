"""The only token of the only request over latents on Hopper, in Gluon: its query is folded where it meets the rows.

A program takes a head and a tile of rows. The weight that folds the head's query and the tile are on their way to
shared memory before the kernel in front is done: of the only request all rows but the token's own were written in
earlier steps. The token's own key is one that no tile has: it is normed and rotated in registers, and joins behind the
last tile's. Each tile's sum is left as a part. Where there are more tiles than pay, a program a head leaves the folded
query instead, for :mod:`atom_core.kernels.mla_attention.hopper`; a captured graph has both launches, and the
request's length says which of them has what to do.

``wgmma`` takes as few columns as eight, of which the head's query is the first.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from atom_core.batch import Batch
from atom_core.cache import LatentCacheView
from atom_core.kernels.attention.splits import Splits, empty_parts
from atom_core.kernels.attention.triton_kernel import LOG2_E
from atom_core.kernels.eviction import EVICT_LAST
from atom_core.kernels.linear.few_rows_hopper import barrier, depend, load, ready
from atom_core.kernels.mla_absorbed_values.triton_kernel import join_parts
from atom_core.kernels.mla_attention.hopper import KEYS, LatentDecode, copy_rows, pages_of
from atom_core.kernels.mla_attention.spec import MlaAttentionSpec
from atom_core.kernels.mla_cache import MlaWeights
from atom_core.kernels.triton_support import launch_options

#: Programs that run at once, one on a multiprocessor. Each reads a head's weight, so that of more than so many tiles a
#: program a head folds the query for all, and so it does where heads leave room for fewer than so many.
_PROGRAMS, _MOST_TILES, _FEWEST_TILES = 132, 6, 3
#: Columns of a product: what ``wgmma`` takes at least.
_COLUMNS = 8
#: Tiles of shared memory that the weight of a head has: as many rows of a latent's numbers.
_WEIGHT_TILES = 2


@gluon.jit
def _partners(R: gl.constexpr, INTERLEAVED: gl.constexpr, layout: gl.constexpr):
    """Of ``R`` numbers that are rotated: which pair each is in, its partner, and whether it is the first of both."""
    half: gl.constexpr = R // 2
    number = gl.arange(0, R, layout)
    if INTERLEAVED:
        pair = number // 2
        is_first = number % 2 == 0
        partner = gl.where(is_first, number + 1, number - 1)
    else:
        pair = number % half
        is_first = number < half
        partner = gl.where(is_first, number + half, number - half)
    return number, pair, partner, is_first


@gluon.jit
def _turned(source, number, partner, is_first, cos, sin):
    """The numbers at ``source`` rotated, rounded to their dtype, in float32."""
    one = gl.load(source + number).to(gl.float32)
    other = gl.load(source + partner).to(gl.float32)
    turned = one * cos + gl.where(is_first, -other, other) * sin
    return turned.to(source.dtype.element_ty).to(gl.float32)


@gluon.jit
def _first_column(of_columns, layout: gl.constexpr):
    """``[rows]`` of ``of_columns [rows, columns]``, in the layout of which it is in."""
    column = gl.arange(0, of_columns.shape[1], gl.SliceLayout(0, layout))
    return gl.sum(gl.where((column == 0)[None, :], of_columns, 0.0), 1)


@gluon.jit(do_not_specialize=["most"])
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
    parts,
    part_sums,
    seq_lens,
    page_table,
    most,
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
    """A head, and one of up to ``most`` tiles: its part, or the folded query where there are more."""
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
    few = tiles <= most
    if tile >= gl.where(few, tiles, 1):
        # One waits though it has nothing to do, so that whoever waits for this kernel waits for those in front as well.
        if OVERLAP and head + tile == 0:
            depend("griddepcontrol.wait; // $0")
        return

    latents = gl.allocate_shared_memory(
        dtype, [1 + WEIGHT_TILES, KEYS, L], gl.NVMMASharedLayout.get_default_for([KEYS, L], dtype)
    )
    keys = gl.allocate_shared_memory(dtype, [KEYS, R], gl.NVMMASharedLayout.get_default_for([KEYS, R], dtype))
    plain = gl.allocate_shared_memory(dtype, [COLUMNS, L], gl.NVMMASharedLayout.get_default_for([COLUMNS, L], dtype))
    turned = gl.allocate_shared_memory(dtype, [COLUMNS, R], gl.NVMMASharedLayout.get_default_for([COLUMNS, R], dtype))
    given = gl.allocate_shared_memory(
        dtype, [WEIGHT_TILES, COLUMNS, KEYS], gl.NVMMASharedLayout.get_default_for([COLUMNS, KEYS], dtype)
    )
    lane = gl.arange(0, KEYS, gl.SliceLayout(1, copied))
    weight = expand + head.to(gl.int64) * stride_expand_head + gl.arange(0, L, gl.SliceLayout(0, copied))[None, :]
    for part in gl.static_range(WEIGHT_TILES):
        taken = part * KEYS + lane
        load(latents.index(1 + part), weight + taken.to(gl.int64)[:, None] * stride_expand, mask=(taken < N)[:, None])
    # Of the token's own row nothing is read: it is written here.
    end = length - 1
    if few:
        key = tile * KEYS + lane
        page = pages_of(page_table, key, end, PAGE)
        copy_rows(latents.index(0), keys, rows, key, page, end, stride_page, stride_row, L, R, PAGE)
    async_copy.commit_group()
    # What no kernel of this package writes is asked for as early.
    turning, pair, partner, is_first = _partners(R, INTERLEAVED, of_rope)
    angles = cos_sin + gl.load(positions).to(gl.int64) * R + pair
    cos = gl.load(angles)
    sin = gl.load(angles + R // 2)
    slot = gl.load(slots)
    number = gl.arange(0, L, of_latent)
    factors = gl.load(norm + number).to(gl.float32)
    if OVERLAP:
        depend("griddepcontrol.wait; // $0")

    query = q + head.to(gl.int64) * stride_q_head
    each = gl.arange(0, KEYS, gl.SliceLayout(0, copied))
    is_query = (gl.arange(0, COLUMNS, gl.SliceLayout(1, copied)) == 0)[:, None]
    for part in gl.static_range(WEIGHT_TILES):
        wanted = part * KEYS + each
        numbers = gl.load(query + wanted, mask=wanted < N, other=0.0)
        given.index(part).store(gl.where(is_query, numbers[None, :], 0.0).to(dtype))
    turned_query = _turned(query + N, turning, partner, is_first, cos, sin)
    turned.store(gl.where(is_query, turned_query[None, :], 0.0).to(dtype))
    # The token's own row, rounded as the cache has it.
    raw = gl.load(latent + number).to(gl.float32)
    own = (raw * (1.0 / gl.sqrt(gl.sum(raw * raw, 0) / L + eps)) * factors).to(dtype).to(gl.float32)
    turned_own = _turned(latent + L, turning, partner, is_first, cos, sin)
    if (head + tile == 0) & (slot >= 0):
        row = rows + slot.to(gl.int64) // PAGE * stride_page + slot.to(gl.int64) % PAGE * stride_row
        gl.store(row + number, own.to(dtype))
        gl.store(row + L + turning, turned_own.to(dtype))

    ready(0)
    folded = gl.zeros([L, COLUMNS], gl.float32, summed)
    for part in gl.static_range(WEIGHT_TILES):
        folded = warpgroup_mma(
            latents.index(1 + part).permute((1, 0)), given.index(part).permute((1, 0)), folded, is_async=True
        )
    folded = warpgroup_mma_wait(0, [folded]).to(dtype)
    if not few:
        target = queries + head.to(gl.int64) * stride_o_head
        gl.store(target + number, _first_column(folded.to(gl.float32), summed).to(dtype), eviction_policy=EVICT_LAST)
        gl.store(target + L + turning, turned_query.to(dtype), eviction_policy=EVICT_LAST)
        return
    plain.store(folded.permute((1, 0)))
    own_score = gl.sum(folded.to(gl.float32) * own[:, None], 0) + gl.sum(turned_query * turned_own, 0)
    own_score = gl.convert_layout(own_score, of_scores) * (scale * LOG2_E)
    fence_async_shared()
    barrier()

    scores = gl.zeros([KEYS, COLUMNS], gl.float32, scored)
    scores = warpgroup_mma(latents.index(0), plain.permute((1, 0)), scores, use_acc=False, is_async=True)
    scores = warpgroup_mma(keys, turned.permute((1, 0)), scores, is_async=True)
    scores = warpgroup_mma_wait(0, [scores])
    of_tile = tile * KEYS + gl.arange(0, KEYS, gl.SliceLayout(1, scored))
    scores = gl.where((of_tile < end)[:, None], scores * (scale * LOG2_E), float("-inf"))
    own_score = gl.where(tile == tiles - 1, own_score, float("-inf"))
    highest = gl.maximum(gl.max(scores, 0), own_score)
    scores = gl.exp2(scores - highest[None, :])
    own_share = gl.exp2(own_score - highest)
    total = gl.sum(scores, 0) + own_share
    given.index(0).store(scores.to(dtype).permute((1, 0)))
    fence_async_shared()
    barrier()
    acc = own[:, None] * gl.convert_layout(own_share, gl.SliceLayout(0, summed))[None, :]
    acc = warpgroup_mma(latents.index(0).permute((1, 0)), given.index(0).permute((1, 0)), acc, is_async=True)
    acc = warpgroup_mma_wait(0, [acc])
    mine = tile.to(gl.int64) * H + head
    gl.store(parts + mine * L + number, _first_column(acc, summed), eviction_policy=EVICT_LAST)
    column = gl.arange(0, COLUMNS, of_scores)
    sums = part_sums + mine * 2 + column * 0
    gl.store(sums, highest, mask=column == 0, eviction_policy=EVICT_LAST)
    gl.store(sums + 1, total, mask=column == 0, eviction_policy=EVICT_LAST)


class MlaFusedDecode:
    """See the module's text; ``overlap``: see :func:`atom_core.kernels.triton_support.overlaps`."""

    def __init__(self, spec: MlaAttentionSpec, overlap: bool) -> None:
        self.spec = spec
        self.decode = LatentDecode(spec, overlap)
        self.overlap = overlap
        tiles = min(_MOST_TILES, _PROGRAMS // spec.latent.num_heads)
        #: Tiles that have a program each, if there are no more.
        self.most = tiles if tiles >= _FEWEST_TILES else 0

    @staticmethod
    def fits(spec: MlaAttentionSpec) -> bool:
        """Whether there is such a kernel for a layer, on Hopper."""
        return LatentDecode.fits(spec) and spec.latent.nope_dim <= _WEIGHT_TILES * KEYS

    def takes(self, num_tokens: int, cache: LatentCacheView, batch: Batch) -> bool:
        """See :class:`atom_core.kernels.mla_fused_decode.MlaFusedDecodeKernel`."""
        alone = num_tokens == len(batch.seq_lens) == 1
        return alone and self.decode.takes(cache, batch) and self.decode.most_parts(batch) > 1

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
        """Launch them."""
        shape, count = self.spec.latent, self.decode.most_parts(batch)
        assert q.stride(-1) == latent.stride(-1) == cache.rows.stride(-1) == weights.expand.stride(-1) == 1
        parts, sums = empty_parts(count, shape.num_heads, shape.rank, q.device)
        folded = q.new_empty(1, shape.num_heads, shape.row)
        most = min(count, self.most)  # each of them is a part
        mla_fused_decode_hopper[shape.num_heads, max(1, most)](
            q,
            latent,
            positions,
            slots,
            weights.cos_sin,
            weights.norm,
            weights.expand,
            cache.rows,
            folded,
            parts,
            sums,
            batch.seq_lens,
            batch.page_table,
            most,
            weights.eps,
            self.spec.scale,
            q.stride(1),
            *weights.expand.stride()[:2],
            *cache.rows.stride()[:2],
            folded.stride(1),
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
        self.decode.launch(folded, cache, batch, None, Splits(count, parts, sums), 1, beyond=most)
        into = weights.expand[:, shape.nope_dim :].transpose(1, 2)
        join_parts(parts, sums, batch, into, out, overlap=self.overlap)
