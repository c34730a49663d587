"""Attention over expanded latents in Triton: for each chunk of keys, one launch after torch's product.

A chunk's rows are gathered from their pages and expanded to keys and values of all heads by one product. A program
takes query tokens of one piece and one head, and reads the piece's keys with an online softmax (arXiv 2205.14135). If a
request's keys are in several chunks, a tile of queries continues where it was: its output so far and the log-sum-exp of
its scores stay in float32 until the last key.

``H`` heads, whose queries have ``N`` elements without rope and ``R`` with it; values have ``V`` elements.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from atom_core.batch import Batch
from atom_core.cache import LatentCacheView
from atom_core.kernels.attention.triton_parts import LOG2_E, range_of
from atom_core.kernels.launch import entry_kernel
from atom_core.kernels.mla_attention.spec import MlaAttentionSpec
from atom_core.kernels.mla_prefill.plan import PrefillPlan, gathered
from atom_core.kernels.triton_support import launch_options, next_power_of_2


@triton.jit
def _walked(
    begin,
    end,
    length,
    position,
    first_key,
    plain_query,
    rope_query,
    keys,
    rope_keys,
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
    """The running softmax after keys ``begin .. end - 1`` of the piece, which has ``length`` keys."""
    plain = tl.arange(0, N_PADDED)
    rope_dim = tl.arange(0, R_PADDED)
    column = tl.arange(0, V_PADDED)
    for tile in tl.range(begin, end, BLOCK_N, num_stages=STAGES):
        other = tile + tl.arange(0, BLOCK_N)
        known = other < length
        row = other.to(tl.int64)
        key = tl.load(
            keys + row[None, :] * stride_expanded + plain[:, None],
            mask=known[None, :] & (plain < N)[:, None],
            other=0.0,
        )
        rope_key = tl.load(
            rope_keys + row[None, :] * stride_row + rope_dim[:, None],
            mask=known[None, :] & (rope_dim < R)[:, None],
            other=0.0,
        )
        scores = tl.dot(plain_query, key, input_precision="ieee")
        scores = tl.dot(rope_query, rope_key, scores, input_precision="ieee") * factor
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
            values + row[:, None] * stride_expanded + column[None, :],
            mask=known[:, None] & (column < V)[None, :],
            other=0.0,
        )
        acc = tl.dot(weights.to(value.dtype), value, acc * shrink[:, None], input_precision="ieee")
        highest = new_highest
    return highest, total, acc


@entry_kernel
@triton.jit(do_not_specialize=["num_pieces"])
def _mla_prefill(
    q,
    expanded,
    rows,
    out,
    sums,
    lse,
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
    piece = range_of(block, tile_starts, num_pieces, BLOCK_Q)
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
    if end <= 0:  # an earlier piece has finished these queries
        return

    token = first + tl.arange(0, BLOCK_Q)
    used = token < num_queries
    position = first_position + token
    plain = tl.arange(0, N_PADDED)
    rope_dim = tl.arange(0, R_PADDED)
    column = tl.arange(0, V_PADDED)
    query = q + (start + token)[:, None] * stride_q_token + head * stride_q_head
    plain_query = tl.load(query + plain[None, :], mask=used[:, None] & (plain < N)[None, :], other=0.0)
    rope_query = tl.load(query + N + rope_dim[None, :], mask=used[:, None] & (rope_dim < R)[None, :], other=0.0)
    highest = tl.full([BLOCK_Q], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_Q], tl.float32)
    acc = tl.zeros([BLOCK_Q, V_PADDED], tl.float32)
    mask = used[:, None] & (column < V)[None, :]
    # Rows of the outputs so far: token, head.
    at = (start + token) * num_heads + head
    if first_key > 0:
        highest = tl.load(lse + at, mask=used, other=0.0)
        total = tl.full([BLOCK_Q], 1.0, tl.float32)
        acc = tl.load(sums + at[:, None] * V + column[None, :], mask=mask, other=0.0)

    keys = expanded + first_row * stride_expanded + head * (N + V)
    rope_keys = rows + first_row * stride_row + L
    values = keys + N
    factor = scale * LOG2_E
    # Keys that every query of the tile sees need no mask.
    seen_by_all = tl.minimum(first_position + first - first_key + 1, num_keys)
    unmasked_end = tl.maximum(seen_by_all, 0) // BLOCK_N * BLOCK_N
    highest, total, acc = _walked(
        0, unmasked_end, num_keys, position, first_key, plain_query, rope_query, keys, rope_keys, values,
        stride_expanded, stride_row, factor, highest, total, acc,
        N, N_PADDED, R, R_PADDED, V, V_PADDED, BLOCK_N, False, STAGES,
    )  # fmt: skip
    highest, total, acc = _walked(
        unmasked_end, end, num_keys, position, first_key, plain_query, rope_query, keys, rope_keys, values,
        stride_expanded, stride_row, factor, highest, total, acc,
        N, N_PADDED, R, R_PADDED, V, V_PADDED, BLOCK_N, True, STAGES,
    )  # fmt: skip
    acc /= tl.where(total == 0.0, 1.0, total)[:, None]
    if last_position >= first_key + num_keys:
        tl.store(sums + at[:, None] * V + column[None, :], acc, mask=mask)
        tl.store(lse + at, highest + tl.log2(total), mask=used)
        return
    target = out + (start + token)[:, None] * stride_o_token + head * stride_o_head
    tl.store(target + column[None, :], acc.to(out.dtype.element_ty), mask=mask)


class TritonMlaPrefill:
    """See :mod:`atom_core.kernels.mla_prefill`.

    Args:
        spec: the layer.
        nvidia: whether the GPU is NVIDIA's; AMD's have less shared memory.
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
        # A single chunk needs no outputs so far.
        rows_and_heads = q.shape[:2] if len(plan.chunks) > 1 else (0, 0)
        sums = torch.empty(*rows_and_heads, shape.value_dim, dtype=torch.float32, device=q.device)
        lse = torch.empty(rows_and_heads, dtype=torch.float32, device=q.device)
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
                lse,
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
                N_PADDED=max(16, next_power_of_2(shape.nope_dim)),
                R=shape.rope_dim,
                R_PADDED=max(16, next_power_of_2(shape.rope_dim)),
                V=shape.value_dim,
                V_PADDED=max(16, next_power_of_2(shape.value_dim)),
                BLOCK_Q=self.block_q,
                BLOCK_N=self.block_n,
                STAGES=2 if self.nvidia else 1,
                OVERLAP=self.overlap,
                num_warps=8 if self.nvidia else 4,
                **launch_options(self.overlap),
            )
