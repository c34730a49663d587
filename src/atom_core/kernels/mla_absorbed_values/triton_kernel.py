"""Decoding over latents on Hopper and the product out of them: the first launch leaves parts, the second joins them.

Where one program of a launch adds up what others have left, it waits for them, for the count of who has arrived, and
for what it reads back. Behind the launch nobody waits but for the launch. The parts of a token are rows of one matrix
product by a head's weight, each with its share in the softmax, and the rows of its result are added up.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from atom_core.batch import Batch
from atom_core.cache import LatentCacheView
from atom_core.kernels.attention.splits import MAX_SPLITS, Splits, empty_parts
from atom_core.kernels.eviction import EVICT_LAST
from atom_core.kernels.mla_attention.hopper import KEYS, LatentDecode
from atom_core.kernels.mla_attention.spec import MlaAttentionSpec
from atom_core.kernels.triton_support import launch_options

#: Tokens, and heads of them all, up to which parts are left for the product, and of how many heads of one token alone:
#: with 128 that token gains, and 8 lose.
_MAX_TOKENS, _MAX_ROWS, _MANY_HEADS = 32, 512, 64
#: Tiles that a part has at least.
_FEWEST_TILES = 1
#: Rows of a product, which are parts of some tokens.
_ROWS = 16


def _tile(num_tokens: int, heads: int) -> tuple[int, int]:
    """Tokens of a program, and values."""
    tokens = min(4 if num_tokens <= 16 else 8, triton.next_power_of_2(num_tokens))
    return tokens, 64 if heads >= _MANY_HEADS else 32


@triton.jit
def _load_parts(parts, part_sums, at, index, part_rows, working, L: tl.constexpr):
    """Of each row, whose token and head are ``at``, the part of that index and its highest score."""
    mine = index * part_rows + at
    used = index < working
    highest = tl.load(part_sums + mine * 2, mask=used, other=float("-inf"))
    return tl.load(parts + mine[:, None] * L + tl.arange(0, L)[None, :], mask=used[:, None], other=0.0), highest


@triton.jit(do_not_specialize=["num_tokens", "num_requests", "count"])
def _values_of_parts(
    parts,
    part_sums,
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
    PLACES: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    KEYS: tl.constexpr,
    LEAST: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """``BLOCK_N`` values of a head of ``BLOCK_T`` tokens, ``PARTS`` parts at a time of the ``count`` there may be."""
    head = tl.program_id(1).to(tl.int64)
    row = tl.arange(0, BLOCK_T * PARTS)
    token = tl.program_id(0) * BLOCK_T + row // PARTS
    column = tl.program_id(2) * BLOCK_N + tl.arange(0, BLOCK_N)
    number = tl.arange(0, L)
    inside = (column < V)[None, :]
    weights = expand + head * stride_e_head + column.to(tl.int64)[None, :] * stride_e_out
    b = tl.load(weights + number.to(tl.int64)[:, None] * stride_e_in, mask=inside, other=0.0)
    # Whose token it is, and in how many parts attention leaves it: as it works that out.
    other = tl.arange(0, REQUESTS)
    ends = tl.load(query_start_loc + 1 + other, mask=other < num_requests, other=2147483647)
    request = tl.sum((ends[None, :] <= token[:, None]).to(tl.int32), 1)
    taken = (request < num_requests) & (token < num_tokens)
    tiles = tl.cdiv(tl.load(seq_lens + request, mask=taken, other=0), KEYS)
    working = tl.cdiv(tiles, tl.maximum(tl.cdiv(tiles, count), LEAST))
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    at = token.to(tl.int64) * H + head
    part_rows = tl.cast(num_tokens, tl.int64) * H
    # Asked for before anything is waited for.
    index = row % PARTS
    part, part_highest = _load_parts(parts, part_sums, at, index, part_rows, working, L)
    place = tl.arange(0, PLACES)
    there = place[None, :] < working[:, None]
    sums = part_sums + (place[None, :] * part_rows + at[:, None]) * 2
    highest = tl.load(sums, mask=there, other=float("-inf"))
    total = tl.load(sums + 1, mask=there, other=0.0)
    # A token of nobody has no part: keep exp2() away from inf - inf.
    most = tl.max(highest, 1)
    base = tl.where(most == float("-inf"), 0.0, most)
    total = tl.sum(total * tl.exp2(highest - base[:, None]), 1)
    total = tl.where(total == 0.0, 1.0, total)
    acc = tl.zeros([BLOCK_T * PARTS, BLOCK_N], tl.float32)
    for _ in tl.range(0, tl.max(working, 0), PARTS):
        share = tl.exp2(part_highest - base) / total
        a = (part * share[:, None]).to(b.dtype)
        index += PARTS
        part, part_highest = _load_parts(parts, part_sums, at, index, part_rows, working, L)
        acc = tl.dot(a, b, acc, input_precision="ieee")
    values = tl.sum(acc.reshape(BLOCK_T, PARTS, BLOCK_N), 1)
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    known = (token < tl.load(query_start_loc + num_requests))[:, None] & inside
    to = out + token.to(tl.int64)[:, None] * stride_o_token + head * stride_o_head + column[None, :]
    tl.store(to, values.to(out.dtype.element_ty), mask=known, eviction_policy=EVICT_LAST)


class TritonMlaAbsorbedValues:
    """See the module's text; ``overlap``: see :func:`atom_core.kernels.triton_support.overlaps`."""

    def __init__(self, spec: MlaAttentionSpec, overlap: bool) -> None:
        self.decode = LatentDecode(spec, overlap)

    def takes(self, num_tokens: int, cache: LatentCacheView, batch: Batch) -> bool:
        """See :class:`atom_core.kernels.mla_absorbed_values.MlaAbsorbedValuesKernel`."""
        heads = self.decode.spec.latent.num_heads
        most = 1 if heads >= _MANY_HEADS else min(_MAX_TOKENS, _MAX_ROWS // heads)
        few = 0 < num_tokens <= most and len(batch.seq_lens) <= _MAX_TOKENS
        return few and self.decode.takes(cache, batch) and self.decode.most_parts(batch) > 1

    def __call__(
        self,
        q: torch.Tensor,
        cache: LatentCacheView,
        batch: Batch,
        expand: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """Launch them."""
        shape, num_tokens = self.decode.spec.latent, q.shape[0]
        count = self.decode.most_parts(batch)
        parts, sums = empty_parts(count, num_tokens * shape.num_heads, shape.rank, q.device)
        self.decode.launch(q, cache, batch, None, Splits(count, parts, sums), _FEWEST_TILES)
        join_parts(parts, sums, batch, expand, out, overlap=self.decode.overlap)


def join_parts(
    parts: torch.Tensor,
    sums: torch.Tensor,
    batch: Batch,
    expand: torch.Tensor,
    out: torch.Tensor,
    *,
    overlap: bool,
) -> None:
    """What :meth:`LatentDecode.launch` has left of each token's parts, multiplied.

    Args:
        parts: float32 ``[parts, T * H, L]``, sums that are not divided by.
        sums: float32 ``[parts, T * H, 2]``: the highest score, in powers of two, and what to divide by.
        batch: the batch.
        expand: ``[H, L, V]``.
        out: ``[T, H, V]``, written where there is a request's token.
        overlap: see :func:`atom_core.kernels.triton_support.overlaps`.
    """
    heads, rank, values = expand.shape
    num_tokens, num_requests = out.shape[0], batch.seq_lens.shape[0]
    assert out.stride(-1) == 1
    assert 1 in expand.stride()[1:]
    assert rank == triton.next_power_of_2(rank)
    assert num_requests <= _MAX_TOKENS
    tokens, block = _tile(num_tokens, heads)
    _values_of_parts[triton.cdiv(num_tokens, tokens), heads, triton.cdiv(values, block)](
        parts,
        sums,
        expand,
        out,
        batch.query_start_loc,
        batch.seq_lens,
        num_tokens,
        num_requests,
        len(parts),
        *expand.stride(),
        *out.stride()[:2],
        H=heads,
        L=rank,
        V=values,
        # As many as there may be: for each other number the kernel would be compiled anew.
        REQUESTS=_MAX_TOKENS,
        PLACES=MAX_SPLITS,
        PARTS=_ROWS // tokens,
        BLOCK_T=tokens,
        BLOCK_N=block,
        KEYS=KEYS,
        LEAST=_FEWEST_TILES,
        OVERLAP=overlap,
        num_warps=4,
        **launch_options(overlap),
    )
