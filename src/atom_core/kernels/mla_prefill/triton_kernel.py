"""Attention over expanded latents in Triton: a chunk of keys at a time, each in one launch behind torch's product.

A chunk's rows are gathered from their pages, and expanded to keys and values of all heads by one product. A program
takes query tokens of one piece and one head, and walks the piece's keys with an online softmax (arXiv 2205.14135).
Where a request's keys are in several chunks, a tile of queries goes on where it was: what it has summed up so far, and
the logarithm of its softmax's sum, are kept in float32 until its last key.

``H`` heads, whose queries have ``N`` and ``R`` numbers, the latter rotated; ``V`` numbers of a value.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from atom_core.batch import Batch
from atom_core.cache import LatentCacheView
from atom_core.kernels.attention.triton_kernel import LOG2_E, place_of
from atom_core.kernels.mla_attention.spec import MlaAttentionSpec
from atom_core.kernels.mla_prefill.plan import PrefillPlan, gathered
from atom_core.kernels.triton_support import launch_options


@triton.jit
def _walked(
    begin,
    end,
    length,
    position,
    first_key,
    plain_query,
    turned_query,
    keys,
    turned_keys,
    values,
    stride_expanded,
    stride_row,
    factor,
    highest,
    total,
    acc,
    N: tl.constexpr,
    N_PADDED: tl.constexpr,
    R: tl.constexpr,
    R_PADDED: tl.constexpr,
    V: tl.constexpr,
    V_PADDED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr,
    STAGES: tl.constexpr,
):
    """The running softmax after keys ``begin .. end - 1`` of the piece, of which there are ``length``."""
    plain = tl.arange(0, N_PADDED)
    turned = tl.arange(0, R_PADDED)
    number = tl.arange(0, V_PADDED)
    for tile in tl.range(begin, end, BLOCK_N, num_stages=STAGES):
        other = tile + tl.arange(0, BLOCK_N)
        known = other < length
        row = other.to(tl.int64)
        key = tl.load(
            keys + row[None, :] * stride_expanded + plain[:, None],
            mask=known[None, :] & (plain < N)[:, None],
            other=0.0,
        )
        turned_key = tl.load(
            turned_keys + row[None, :] * stride_row + turned[:, None],
            mask=known[None, :] & (turned < R)[:, None],
            other=0.0,
        )
        scores = tl.dot(plain_query, key, input_precision="ieee")
        scores = tl.dot(turned_query, turned_key, scores, input_precision="ieee") * factor
        if MASKED:
            seen = (first_key + other[None, :] <= position[:, None]) & known[None, :]
            scores = tl.where(seen, scores, float("-inf"))
        new_highest = tl.maximum(highest, tl.max(scores, 1))
        # A query may see no key of this piece: keep exp2() away from inf - inf.
        base = tl.where(new_highest == float("-inf"), 0.0, new_highest)
        weights = tl.exp2(scores - base[:, None])
        shrink = tl.exp2(highest - base)
        total = total * shrink + tl.sum(weights, 1)
        value = tl.load(
            values + row[:, None] * stride_expanded + number[None, :],
            mask=known[:, None] & (number < V)[None, :],
            other=0.0,
        )
        acc = tl.dot(weights.to(value.dtype), value, acc * shrink[:, None], input_precision="ieee")
        highest = new_highest
    return highest, total, acc


@triton.jit(do_not_specialize=["num_pieces"])
def _mla_prefill(
    q,
    expanded,
    rows,
    out,
    sums,
    logarithms,
    table,
    tile_starts,
    num_pieces,
    scale,
    stride_q_token,
    stride_q_head,
    stride_expanded,
    stride_row,
    stride_o_token,
    stride_o_head,
    L: tl.constexpr,
    N: tl.constexpr,
    N_PADDED: tl.constexpr,
    R: tl.constexpr,
    R_PADDED: tl.constexpr,
    V: tl.constexpr,
    V_PADDED: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    block = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    num_heads = tl.num_programs(1)
    piece = place_of(block, tile_starts, num_pieces, BLOCK_Q)
    start = tl.load(table + piece * 6).to(tl.int64)
    num_queries = tl.load(table + piece * 6 + 1)
    first_position = tl.load(table + piece * 6 + 2)
    first_key = tl.load(table + piece * 6 + 3)
    first_row = tl.load(table + piece * 6 + 4).to(tl.int64)
    num_keys = tl.load(table + piece * 6 + 5)
    first = (block - (tl.load(tile_starts + piece) // BLOCK_Q + piece)) * BLOCK_Q
    if first >= num_queries:
        return
    last_position = first_position + tl.minimum(first + BLOCK_Q, num_queries) - 1
    end = tl.minimum(last_position - first_key + 1, num_keys)
    if end <= 0:  # these queries were done with an earlier piece
        return

    token = first + tl.arange(0, BLOCK_Q)
    used = token < num_queries
    position = first_position + token
    plain = tl.arange(0, N_PADDED)
    turned = tl.arange(0, R_PADDED)
    number = tl.arange(0, V_PADDED)
    query = q + (start + token)[:, None] * stride_q_token + head * stride_q_head
    plain_query = tl.load(query + plain[None, :], mask=used[:, None] & (plain < N)[None, :], other=0.0)
    turned_query = tl.load(query + N + turned[None, :], mask=used[:, None] & (turned < R)[None, :], other=0.0)
    highest = tl.full([BLOCK_Q], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_Q], tl.float32)
    acc = tl.zeros([BLOCK_Q, V_PADDED], tl.float32)
    kept = used[:, None] & (number < V)[None, :]
    # Where sums so far are: token, head.
    at = (start + token) * num_heads + head
    if first_key > 0:
        highest = tl.load(logarithms + at, mask=used, other=0.0)
        total = tl.full([BLOCK_Q], 1.0, tl.float32)
        acc = tl.load(sums + at[:, None] * V + number[None, :], mask=kept, other=0.0)

    keys = expanded + first_row * stride_expanded + head * (N + V)
    turned_keys = rows + first_row * stride_row + L
    values = keys + N
    factor = scale * LOG2_E
    # Keys that every query of the tile sees need no mask.
    seen_by_all = tl.minimum(first_position + first - first_key + 1, num_keys)
    unmasked_end = tl.maximum(seen_by_all, 0) // BLOCK_N * BLOCK_N
    highest, total, acc = _walked(
        0, unmasked_end, num_keys, position, first_key, plain_query, turned_query, keys, turned_keys, values,
        stride_expanded, stride_row, factor, highest, total, acc,
        N, N_PADDED, R, R_PADDED, V, V_PADDED, BLOCK_N, False, STAGES,
    )  # fmt: skip
    highest, total, acc = _walked(
        unmasked_end, end, num_keys, position, first_key, plain_query, turned_query, keys, turned_keys, values,
        stride_expanded, stride_row, factor, highest, total, acc,
        N, N_PADDED, R, R_PADDED, V, V_PADDED, BLOCK_N, True, STAGES,
    )  # fmt: skip
    acc /= tl.where(total == 0.0, 1.0, total)[:, None]
    if last_position >= first_key + num_keys:
        tl.store(sums + at[:, None] * V + number[None, :], acc, mask=kept)
        tl.store(logarithms + at, highest + tl.log2(total), mask=used)
        return
    target = out + (start + token)[:, None] * stride_o_token + head * stride_o_head
    tl.store(target + number[None, :], acc.to(out.dtype.element_ty), mask=kept)


class TritonMlaPrefill:
    """See :mod:`atom_core.kernels.mla_prefill`.

    Args:
        spec: the layer.
        nvidia: whether the device is one of NVIDIA's; others have less shared memory.
        overlap: see :func:`atom_core.kernels.triton_support.overlaps`.
    """

    laid_out = 0

    def __init__(self, spec: MlaAttentionSpec, nvidia: bool, overlap: bool) -> None:
        self.spec = spec
        self.nvidia, self.overlap = nvidia, overlap
        wide = 2 if spec.latent.dtype == torch.float32 else 1
        self.block_q, self.block_n = (128 // wide, 64 // wide) if nvidia else (64 // wide, 32 // wide)

    def __call__(
        self,
        q: torch.Tensor,
        expand: torch.Tensor,
        cache: LatentCacheView,
        batch: Batch,
        plan: PrefillPlan,
        out: torch.Tensor,
    ) -> None:
        """Write the attention of the plan's requests to ``out``."""
        shape = self.spec.latent
        assert q.stride(-1) == out.stride(-1) == 1
        # Nothing is kept where all keys are in one chunk.
        kept = q.shape[:2] if len(plan.chunks) > 1 else (0, 0)
        sums = torch.empty(*kept, shape.value_dim, dtype=torch.float32, device=q.device)
        logarithms = torch.empty(kept, dtype=torch.float32, device=q.device)
        for chunk in plan.chunks:
            rows = gathered(chunk, cache, batch, q.dtype)
            expanded = F.linear(rows[:, : shape.rank], expand.flatten(0, 1))
            num_pieces = len(chunk.pieces)
            _mla_prefill[chunk.num_queries // self.block_q + num_pieces, shape.num_heads](
                q,
                expanded,
                rows,
                out,
                sums,
                logarithms,
                chunk.table,
                chunk.tile_starts,
                num_pieces,
                self.spec.scale,
                *q.stride()[:2],
                expanded.stride(0),
                rows.stride(0),
                *out.stride()[:2],
                L=shape.rank,
                N=shape.nope_dim,
                N_PADDED=max(16, triton.next_power_of_2(shape.nope_dim)),
                R=shape.rope_dim,
                R_PADDED=max(16, triton.next_power_of_2(shape.rope_dim)),
                V=shape.value_dim,
                V_PADDED=max(16, triton.next_power_of_2(shape.value_dim)),
                BLOCK_Q=self.block_q,
                BLOCK_N=self.block_n,
                STAGES=2 if self.nvidia else 1,
                OVERLAP=self.overlap,
                num_warps=8 if self.nvidia else 4,
                **launch_options(self.overlap),
            )
