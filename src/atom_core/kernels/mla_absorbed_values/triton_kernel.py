"""MLA decode on Hopper with the value projection: the first launch leaves splits, the second merges and projects them.

In a single launch the last program to finish waits for the other programs, for the counter, and for the partial results
that it reads back. Here the second launch waits for the first one only. The splits of a token are rows of one matrix
product with a head's weight, scaled by their softmax weights, and the rows of the product are added up.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator

import torch
import triton
import triton.language as tl

from atom_core.batch import Batch, BatchShape
from atom_core.cache import LatentCacheView
from atom_core.kernels.attention.splits import MAX_SPLITS, Splits, empty_partials
from atom_core.kernels.eviction import EVICT_LAST
from atom_core.kernels.launch import entry_kernel
from atom_core.kernels.mla_attention.hopper import KEYS, LatentDecode
from atom_core.kernels.mla_attention.spec import MlaAttentionSpec
from atom_core.kernels.triton_support import cdiv, launch_options, next_power_of_2

#: The most tokens, and tokens times heads. From _MANY_HEADS on, the most is one token: with 128 heads 8 are slower.
_MAX_TOKENS, _MAX_ROWS, _MANY_HEADS = 32, 512, 64
#: The fewest tiles of a split.
_MIN_TILES = 1
#: Rows of a product: the splits of some tokens.
_ROWS = 16


def _tile(num_tokens: int, heads: int) -> tuple[int, int]:
    """Tokens and values of a program."""
    tokens = min(4 if num_tokens <= 16 else 8, next_power_of_2(num_tokens))
    return tokens, 64 if heads >= _MANY_HEADS else 32


@triton.jit
def _load_split(partials, stats, at, index, split_rows, working, L: tl.constexpr):
    """Split ``index`` of each row ``at`` (token and head): its partial output and largest score."""
    mine = index * split_rows + at
    used = index < working
    highest = tl.load(stats + mine * 2, mask=used, other=float("-inf"))
    return tl.load(partials + mine[:, None] * L + tl.arange(0, L)[None, :], mask=used[:, None], other=0.0), highest


@entry_kernel
@triton.jit(do_not_specialize=["num_tokens", "num_requests", "count"])
def _values_of_splits(
    partials,
    stats,
    expand,
    out,
    query_start_loc,
    seq_lens,
    num_tokens,
    num_requests,
    count,
    stride_e_head,
    stride_e_in,
    stride_e_out,
    stride_o_token,
    stride_o_head,
    H: tl.constexpr,
    L: tl.constexpr,
    V: tl.constexpr,
    REQUESTS: tl.constexpr,
    SPLITS_PADDED: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    KEYS: tl.constexpr,
    MIN_TILES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """``BLOCK_N`` values of a head for ``BLOCK_T`` tokens, from up to ``count`` splits, ``SPLITS`` at a time."""
    head = tl.program_id(1).to(tl.int64)
    row = tl.arange(0, BLOCK_T * SPLITS)
    token = tl.program_id(0) * BLOCK_T + row // SPLITS
    column = tl.program_id(2) * BLOCK_N + tl.arange(0, BLOCK_N)
    latent_dim = tl.arange(0, L)
    inside = (column < V)[None, :]
    weights = expand + head * stride_e_head + column.to(tl.int64)[None, :] * stride_e_out
    b = tl.load(weights + latent_dim.to(tl.int64)[:, None] * stride_e_in, mask=inside, other=0.0)
    # The token's request and its number of splits, computed as in the attention kernel.
    other = tl.arange(0, REQUESTS)
    ends = tl.load(query_start_loc + 1 + other, mask=other < num_requests, other=2147483647)
    request = tl.sum((ends[None, :] <= token[:, None]).to(tl.int32), 1)
    taken = (request < num_requests) & (token < num_tokens)
    tiles = tl.cdiv(tl.load(seq_lens + request, mask=taken, other=0), KEYS)
    working = tl.cdiv(tiles, tl.maximum(tl.cdiv(tiles, count), MIN_TILES))
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    at = token.to(tl.int64) * H + head
    split_rows = tl.cast(num_tokens, tl.int64) * H
    # These loads are issued before the first wait for data.
    index = row % SPLITS
    partial, split_highest = _load_split(partials, stats, at, index, split_rows, working, L)
    place = tl.arange(0, SPLITS_PADDED)
    there = place[None, :] < working[:, None]
    stats_at = stats + (place[None, :] * split_rows + at[:, None]) * 2
    highest = tl.load(stats_at, mask=there, other=float("-inf"))
    total = tl.load(stats_at + 1, mask=there, other=0.0)
    # A padded token has no split: keep exp2() away from inf - inf.
    top = tl.max(highest, 1)
    base = tl.where(top == float("-inf"), 0.0, top)
    total = tl.sum(total * tl.exp2(highest - base[:, None]), 1)
    total = tl.where(total == 0.0, 1.0, total)
    acc = tl.zeros([BLOCK_T * SPLITS, BLOCK_N], tl.float32)
    for _ in tl.range(0, tl.max(working, 0), SPLITS):
        share = tl.exp2(split_highest - base) / total
        a = (partial * share[:, None]).to(b.dtype)
        index += SPLITS
        partial, split_highest = _load_split(partials, stats, at, index, split_rows, working, L)
        acc = tl.dot(a, b, acc, input_precision="ieee")
    values = tl.sum(acc.reshape(BLOCK_T, SPLITS, BLOCK_N), 1)
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    known = (token < tl.load(query_start_loc + num_requests))[:, None] & inside
    to = out + token.to(tl.int64)[:, None] * stride_o_token + head * stride_o_head + column[None, :]
    tl.store(to, values.to(out.dtype.element_ty), mask=known, eviction_policy=EVICT_LAST)


class TritonMlaAbsorbedValues:
    """See the module; ``overlap``: see :func:`atom_core.kernels.triton_support.overlaps`."""

    def __init__(self, spec: MlaAttentionSpec, overlap: bool) -> None:
        self.decode = LatentDecode(spec, overlap)

    def takes(self, num_tokens: int, cache: LatentCacheView, batch: Batch) -> bool:
        """See :class:`atom_core.kernels.mla_absorbed_values.MlaAbsorbedValuesKernel`."""
        few = self._few(num_tokens, len(batch.seq_lens))
        return few and self.decode.takes(cache, batch) and self.decode.max_splits(batch) > 1

    def _few(self, num_tokens: int, num_requests: int) -> bool:
        heads = self.decode.spec.latent.num_heads
        max_tokens = 1 if heads >= _MANY_HEADS else min(_MAX_TOKENS, _MAX_ROWS // heads)
        return 0 < num_tokens <= max_tokens and num_requests <= _MAX_TOKENS

    def takes_shape(self, shape: BatchShape, device: torch.device) -> bool:
        """See :class:`atom_core.kernels.mla_absorbed_values.MlaAbsorbedValuesKernel`."""
        few = self._few(shape.num_tokens, shape.num_requests)
        return few and self.decode.takes_shape(shape) and self.decode.max_splits_of(shape, device) > 1

    def attention_compile_keys(self, shape: BatchShape, device: torch.device) -> Iterator[Hashable]:
        """See :class:`atom_core.kernels.compile_keys.AttentionCompileKeys`."""
        yield from self.decode.attention_compile_keys(shape, device)
        yield _tile(shape.num_tokens, self.decode.spec.latent.num_heads)

    def __call__(
        self,
        q: torch.Tensor,
        cache: LatentCacheView,
        batch: Batch,
        expand: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """Launch both kernels."""
        shape, num_tokens = self.decode.spec.latent, q.shape[0]
        count = self.decode.max_splits(batch)
        partials, stats = empty_partials(count, num_tokens * shape.num_heads, shape.rank, q.device)
        self.decode.launch(q, cache, batch, None, Splits(count, partials, stats), _MIN_TILES)
        merged_values(partials, stats, batch, expand, out, overlap=self.decode.overlap)


def merged_values(
    partials: torch.Tensor,
    stats: torch.Tensor,
    batch: Batch,
    expand: torch.Tensor,
    out: torch.Tensor,
    *,
    overlap: bool,
) -> None:
    """Merge the splits that :meth:`LatentDecode.launch` has left, and project them to values.

    Args:
        partials: float32 ``[splits, T * H, L]``, not divided by the softmax's sums.
        stats: float32 ``[splits, T * H, 2]``: the largest score, to the base 2, and the softmax's sum.
        batch: the batch.
        expand: ``[H, L, V]``.
        out: ``[T, H, V]``, written for tokens of requests.
        overlap: see :func:`atom_core.kernels.triton_support.overlaps`.
    """
    heads, rank, values = expand.shape
    num_tokens, num_requests = out.shape[0], batch.seq_lens.shape[0]
    assert out.stride(-1) == 1
    assert 1 in expand.stride()[1:]
    assert rank == next_power_of_2(rank)
    assert num_requests <= _MAX_TOKENS
    tokens, block = _tile(num_tokens, heads)
    _values_of_splits[cdiv(num_tokens, tokens), heads, cdiv(values, block)](
        partials,
        stats,
        expand,
        out,
        batch.query_start_loc,
        batch.seq_lens,
        num_tokens,
        num_requests,
        len(partials),
        *expand.stride(),
        *out.stride()[:2],
        H=heads,
        L=rank,
        V=values,
        # The maxima: each other value would compile the kernel again.
        REQUESTS=_MAX_TOKENS,
        SPLITS_PADDED=MAX_SPLITS,
        SPLITS=_ROWS // tokens,
        BLOCK_T=tokens,
        BLOCK_N=block,
        KEYS=KEYS,
        MIN_TILES=_MIN_TILES,
        OVERLAP=overlap,
        num_warps=4,
        **launch_options(overlap),
    )
