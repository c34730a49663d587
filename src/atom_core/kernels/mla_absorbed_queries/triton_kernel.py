"""The latent's cache row and the absorbed queries in Triton: one launch.

A program takes some tokens and some elements of one head's absorbed queries. It loads its weights before the kernel
before it has ended. The programs of the first elements also rotate the rest of the query. Programs after those of the
last head write some tokens' latents to the cache, as in :mod:`atom_core.kernels.mla_cache`.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from atom_core.batch import BatchShape
from atom_core.cache import LatentCacheView
from atom_core.kernels.cache_dtypes import saturation_limit
from atom_core.kernels.eviction import eviction_policy
from atom_core.kernels.launch import entry_kernel
from atom_core.kernels.mla_cache.triton_kernel import angles_of, rotate, write_rows
from atom_core.kernels.triton_support import cdiv, launch_options, next_power_of_2

if TYPE_CHECKING:
    from atom_core.kernels.mla_cache import MlaSpec, MlaWeights

#: The most tokens that use small tiles, for many programs: of layers with many heads, which have enough programs
#: anyway, and of others. An H200 takes 4.8 us for 32 tokens of 128 heads with the larger tile, 11.2 with the smaller.
_MANY_HEADS, _FEW_OF_MANY_HEADS, _FEW_TOKENS = 64, 16, 64
#: The most tokens of a launch.
_MAX_TOKENS = 256
#: The most inputs for the larger tile, which multiplies by all of them at once.
_AT_ONCE = 128


@dataclass(frozen=True)
class Tile:
    """The tile of one program."""

    tokens: int
    columns: int
    """Elements of a latent."""
    warps: int
    extra: int
    """As many heads' worth of programs, after the last head, write to the cache."""


#: For few and for more tokens, as in :mod:`atom_core.kernels.head_linear`.
_FEW, _MANY = Tile(16, 32, 4, 1), Tile(64, 128, 8, 4)


def _tile(num_tokens: int, num_heads: int, most_tokens: int) -> Tile:
    """``most_tokens``: of a launch, which tells whether the larger tile is used."""
    few = _FEW_OF_MANY_HEADS if num_heads >= _MANY_HEADS and most_tokens > _FEW_TOKENS else _FEW_TOKENS
    return _FEW if num_tokens <= few else _MANY


@entry_kernel
@triton.jit(do_not_specialize=["num_tokens"])
def _mla_absorbed_queries(
    q,
    latent,
    positions,
    slots,
    cos_sin,
    norm,
    expand,
    rows,
    queries,
    num_tokens,
    eps,
    scale,
    stride_q_token,
    stride_q_head,
    stride_latent,
    stride_expand_head,
    stride_expand,
    stride_page,
    stride_row,
    stride_o_token,
    stride_o_head,
    PAGE: tl.constexpr,
    H: tl.constexpr,
    N: tl.constexpr,
    R: tl.constexpr,
    L: tl.constexpr,
    L_PADDED: tl.constexpr,
    PAIRS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ROWS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    LIMIT: tl.constexpr,
    POLICY: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    head = tl.program_id(1).to(tl.int64)
    block = tl.program_id(0)
    if head >= H:
        if OVERLAP:
            tl.extra.cuda.gdc_launch_dependents()
            tl.extra.cuda.gdc_wait()
        place = ((tl.program_id(1) - H) * tl.num_programs(0) + block) * ROWS + tl.arange(0, ROWS)
        token = (tl.program_id(2) * BLOCK_T + place).to(tl.int64)
        mine = (token < num_tokens) & (place < BLOCK_T)
        write_rows(
            latent,
            positions,
            slots,
            cos_sin,
            norm,
            rows,
            token,
            mine,
            eps,
            scale,
            stride_latent,
            stride_page,
            stride_row,
            PAGE,
            R,
            L,
            L_PADDED,
            PAIRS,
            INTERLEAVED,
            LIMIT,
        )
        return

    column = block * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = (column < L)[None, :]
    inner = tl.arange(0, BLOCK_K)
    weights = expand + head * stride_expand_head + column[None, :]
    factors = tl.load(
        weights + inner.to(tl.int64)[:, None] * stride_expand, mask=(inner < N)[:, None] & inside, other=0.0
    )
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    token = tl.program_id(2) * BLOCK_T + tl.arange(0, BLOCK_T)
    taken = token < num_tokens
    token = token.to(tl.int64)
    query = q + token[:, None] * stride_q_token + head * stride_q_head
    target = queries + token[:, None] * stride_o_token + head * stride_o_head
    x = tl.load(query + inner[None, :], mask=taken[:, None] & (inner < N)[None, :], other=0.0)
    total = tl.dot(x, factors, input_precision="ieee")
    for begin in tl.range(BLOCK_K, N, BLOCK_K):
        inner = begin + tl.arange(0, BLOCK_K)
        known = inner < N
        factors = tl.load(
            weights + inner.to(tl.int64)[:, None] * stride_expand, mask=known[:, None] & inside, other=0.0
        )
        x = tl.load(query + inner[None, :], mask=taken[:, None] & known[None, :], other=0.0)
        total = tl.dot(x, factors, total, input_precision="ieee")
    absorbed = total.to(queries.dtype.element_ty)
    tl.store(target + column[None, :], absorbed, mask=taken[:, None] & inside, eviction_policy=POLICY)

    if block == 0:
        cos, sin, first, second, paired = angles_of(cos_sin, positions, token, taken, R, PAIRS, INTERLEAVED)
        rotate(query + N, target + L, cos, sin, first, second, paired, taken, R, BLOCK_T, PAIRS, INTERLEAVED)


class TritonMlaAbsorbedQueries:
    """See :mod:`atom_core.kernels.mla_absorbed_queries`.

    Args:
        spec: the layer.
        overlap: see :func:`atom_core.kernels.triton_support.overlaps`.
    """

    def __init__(self, spec: MlaSpec, overlap: bool) -> None:
        self.spec, self.overlap = spec, overlap
        # Measured on Hopper only, where the larger tile fits in registers.
        many = overlap and spec.dtype.itemsize == 2 and spec.nope_dim <= _AT_ONCE
        self.max_tokens = _MAX_TOKENS if many else _FEW_TOKENS

    def attention_compile_keys(self, shape: BatchShape, device: torch.device) -> Iterator[Hashable]:
        """See :class:`atom_core.kernels.compile_keys.AttentionCompileKeys`."""
        yield _tile(shape.num_tokens, self.spec.num_heads, self.max_tokens)

    def __call__(
        self,
        q: torch.Tensor,
        latent: torch.Tensor,
        positions: torch.Tensor,
        weights: MlaWeights,
        cache: LatentCacheView,
        slots: torch.Tensor,
        queries: torch.Tensor,
    ) -> None:
        """Launch the kernel."""
        spec, num_tokens = self.spec, q.shape[0]
        assert num_tokens <= self.max_tokens
        assert q.stride(-1) == latent.stride(-1) == cache.rows.stride(-1) == queries.stride(-1) == 1
        assert weights.expand.stride(-1) == 1
        if not num_tokens:
            return
        tile = _tile(num_tokens, spec.num_heads, self.max_tokens)
        blocks = cdiv(spec.rank, tile.columns)
        rows = cdiv(tile.tokens, blocks * tile.extra)
        _mla_absorbed_queries[blocks, spec.num_heads + tile.extra, cdiv(num_tokens, tile.tokens)](
            q,
            latent,
            positions,
            slots,
            weights.cos_sin,
            weights.norm,
            weights.expand,
            cache.rows,
            queries,
            num_tokens,
            weights.eps,
            cache.scale,
            *q.stride()[:2],
            latent.stride(0),
            *weights.expand.stride()[:2],
            *cache.rows.stride()[:2],
            *queries.stride()[:2],
            PAGE=cache.page_size,
            H=spec.num_heads,
            N=spec.nope_dim,
            R=spec.rope_dim,
            L=spec.rank,
            L_PADDED=next_power_of_2(spec.rank),
            PAIRS=next_power_of_2(spec.rope_dim // 2),
            BLOCK_T=tile.tokens,
            BLOCK_N=tile.columns,
            BLOCK_K=max(16, min(128, next_power_of_2(spec.nope_dim))),
            ROWS=next_power_of_2(rows),
            INTERLEAVED=spec.interleaved,
            LIMIT=saturation_limit(cache.rows.dtype),
            POLICY=eviction_policy(spec.num_heads) if tile is _MANY else "",
            OVERLAP=self.overlap,
            num_warps=tile.warps,
            **launch_options(self.overlap),
        )
