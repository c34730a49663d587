"""Paged attention in Triton: prefill, decode and mixed batches in one launch.

A program takes ``BLOCK_Q`` query tokens of one request and all query heads of one key/value head, so that a tile of
keys serves the whole group; it walks the request's keys in tiles of ``BLOCK_N`` with an online softmax
(arXiv 2205.14135). Programs are numbered so that request ``r`` starts at ``query_start_loc[r] // BLOCK_Q + r``: the
grid depends on the number of tokens and requests alone, never on a length, so a captured graph replays for any batch.

Few programs leave most of a GPU idle, so where there are few, several share the keys of one tile ("splits"; flash
decoding, https://crfm.stanford.edu/2023/10/12/flashdecoding.html). How many there may be depends on the grid, how many
have work on the length. Each stores its part; the last to arrive adds the parts up, always in the same order.

``T`` tokens, ``H`` query heads, ``K`` key/value heads, ``D`` head size up to 256, ``P`` page size, any strides.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from atom_core.kernels.triton_support import launch_options
from atom_core.metadata import AttentionMetadata, CacheOrder, GraphSupport, KVCacheView

if TYPE_CHECKING:
    from atom_core.kernels.attention import PagedAttentionSpec

#: Programs that keep a large GPU busy, and at most how many share a request's keys.
_PROGRAMS, _MAX_SPLITS = 512, 32


@triton.jit
def _attention(
    q,
    key,
    value,
    out,
    sinks,
    parts,
    part_sums,
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
    SPLITS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    block = tl.program_id(0)
    kv_head = tl.program_id(1).to(tl.int64)
    split = tl.program_id(2)

    low = 0
    high = num_requests
    while low < high:
        middle = (low + high) // 2
        if tl.load(query_start_loc + middle) // BLOCK_Q + middle <= block:
            low = middle + 1
        else:
            high = middle
    request = tl.cast(low - 1, tl.int64)
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
    if SPLITS > 1:
        num_tiles = tl.cdiv(end - begin, BLOCK_N)
        share = tl.cdiv(num_tiles, SPLITS)
        working = tl.cdiv(num_tiles, share)
        if split >= working:
            return
        begin += split * share * BLOCK_N
        end = tl.minimum(begin + share * BLOCK_N, end)

    highest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    if HAS_SINKS:  # noqa: SIM102 - decided when compiling, unlike the next
        # The sink is one more key of no value: its logit opens the running softmax, once.
        if split == 0:
            highest = tl.load(sinks + head, mask=row_used, other=0.0).to(tl.float32)
            total = tl.full([BLOCK_M], 1.0, tl.float32)
    acc = tl.zeros([BLOCK_M, D_PADDED], tl.float32)

    for tile in range(begin, end, BLOCK_N):
        other = tile + tl.arange(0, BLOCK_N)
        known = other < length
        page = tl.load(page_table + request * stride_table + other // PAGE, mask=known, other=0).to(tl.int64)
        offset = (other % PAGE).to(tl.int64)
        k_at = page * stride_k_page + kv_head * stride_k_head + offset * stride_k_token
        keys = tl.load(key + k_at[None, :] + dim[:, None], mask=dim_used[:, None] & known[None, :], other=0.0)
        scores = tl.dot(query, keys.to(query.dtype), input_precision="ieee") * (scale * k_scale)
        if HAS_CAP:
            # tanh(x) = 2 / (1 + exp(-2x)) - 1, which Triton has on every target
            scores = soft_cap * (2.0 / (1.0 + tl.exp(-2.0 * scores / soft_cap)) - 1.0)
        seen = (other[None, :] <= position[:, None]) & known[None, :] & row_used[:, None]
        if WINDOW > 0:
            seen &= other[None, :] > position[:, None] - WINDOW
        scores = tl.where(seen, scores, float("-inf"))
        new_highest = tl.maximum(highest, tl.max(scores, 1))
        # A row may have seen no key yet (its window starts later): keep exp() away from inf - inf.
        base = tl.where(new_highest == float("-inf"), 0.0, new_highest)
        weights = tl.exp(scores - base[:, None])
        shrink = tl.exp(highest - base)
        total = total * shrink + tl.sum(weights, 1)
        v_at = page * stride_v_page + kv_head * stride_v_head + offset * stride_v_token
        values = tl.load(value + v_at[:, None] + dim[None, :], mask=known[:, None] & dim_used[None, :], other=0.0)
        values = values.to(query.dtype)
        acc = acc * shrink[:, None] + tl.dot(weights.to(values.dtype), values, input_precision="ieee")
        highest = new_highest

    if SPLITS > 1:  # noqa: SIM102 - decided when compiling, unlike the next
        if working > 1:
            # Rows of the parts: split, token, head.
            at = ((start + token).to(tl.int64) * tl.num_programs(1) + kv_head) * GROUP + rows % GROUP
            part_rows = tl.cast(num_tokens, tl.int64) * tl.num_programs(1) * GROUP
            mine = split * part_rows + at
            kept = row_used[:, None] & dim_used[None, :]
            tl.store(parts + mine[:, None] * D + dim[None, :], acc, mask=kept)
            tl.store(part_sums + mine * 2, highest, mask=row_used)
            tl.store(part_sums + mine * 2 + 1, total, mask=row_used)
            tl.debug_barrier()  # all of this program's stores before its arrival is seen
            arrival = arrivals + block * tl.num_programs(1) + kv_head
            if tl.atomic_add(arrival, 1, sem="acq_rel", scope="gpu") != working - 1:
                return
            tl.store(arrival, 0)  # as the next launch wants it
            highest = tl.full([BLOCK_M], float("-inf"), tl.float32)
            total = tl.zeros([BLOCK_M], tl.float32)
            acc = tl.zeros([BLOCK_M, D_PADDED], tl.float32)
            for other_split in range(working):
                row = other_split * part_rows + at
                other_highest = tl.load(part_sums + row * 2, mask=row_used, other=float("-inf"), cache_modifier=".cg")
                other_total = tl.load(part_sums + row * 2 + 1, mask=row_used, other=0.0, cache_modifier=".cg")
                part = tl.load(parts + row[:, None] * D + dim[None, :], mask=kept, other=0.0, cache_modifier=".cg")
                new_highest = tl.maximum(highest, other_highest)
                base = tl.where(new_highest == float("-inf"), 0.0, new_highest)
                shrink = tl.exp(highest - base)
                other_shrink = tl.exp(other_highest - base)
                total = total * shrink + other_total * other_shrink
                acc = acc * shrink[:, None] + part * other_shrink[:, None]
                highest = new_highest

    acc = acc * v_scale / tl.where(total == 0.0, 1.0, total)[:, None]
    o_at = (start + token).to(tl.int64)[:, None] * stride_o_token + head[:, None] * stride_o_head + dim[None, :]
    tl.store(out + o_at, acc.to(out.dtype.element_ty), mask=row_used[:, None] & dim_used[None, :])


class TritonAttention:
    """See :mod:`atom_core.kernels.attention`.

    Args:
        spec: the layer.
        nvidia: whether the device is one of NVIDIA's; others have less shared memory.
        overlap: see :func:`atom_core.kernels.triton_support.overlaps`.
    """

    order: CacheOrder = "plain"
    graph_support: GraphSupport = "always"

    def __init__(self, spec: PagedAttentionSpec, nvidia: bool, overlap: bool) -> None:
        self.spec = spec
        self.nvidia, self.overlap = nvidia, overlap
        self.group: int = spec.num_heads // spec.num_kv_heads
        self.decode_rows: int = max(16, triton.next_power_of_2(self.group))  # tl.dot wants at least 16
        # Zero between launches. Made on the first run outside of graphs, which all frameworks warm up with.
        self._arrivals: torch.Tensor | None = None

    def _rows(self, max_query_len: int, d_padded: int) -> int:
        """Rows of a tile: as few as can be where each request has few queries, else enough to reuse keys.

        Any choice is right for any batch, so a graph captured with one may replay with other lengths.
        """
        if max_query_len * self.group <= self.decode_rows:
            return self.decode_rows
        return max(self.decode_rows, 64 if d_padded * self.spec.dtype.itemsize <= 256 else 32)

    def _keys_a_tile(self, d_padded: int, split: bool) -> int:
        """64, or as many fewer as keep two tiles of keys and values within the 64 KiB of shared memory of gfx942.

        Where requests are split a program waits for memory most of the time, and takes more at once if it can.
        """
        keys = 64 // (2 if d_padded > 128 else 1) // (2 if self.spec.dtype == torch.float32 else 1)
        return 2 * keys if split and self.nvidia else keys

    def _splits(self, programs: int, max_seq_len: int, device: torch.device) -> int:
        """How many programs may share one tile's keys: a power of two, to compile few variants."""
        wanted = min(_PROGRAMS // max(programs, 1), -(-max_seq_len // 64), _MAX_SPLITS)
        if wanted < 2:
            return 1
        if self._arrivals is None:
            if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                return 1  # zeros that a graph makes are zeros only once that graph has run
            self._arrivals = torch.zeros(_PROGRAMS, dtype=torch.int32, device=device)
        return 1 << (wanted.bit_length() - 1)

    def plan_key(self) -> None:
        """It plans nothing."""
        return

    def plan(self, metadata: AttentionMetadata) -> object:
        """Never called."""
        raise AssertionError("the Triton attention has no plan")

    def __call__(
        self,
        q: torch.Tensor,
        cache: KVCacheView,
        metadata: AttentionMetadata,
        sinks: torch.Tensor | None,
        out: torch.Tensor,
    ) -> None:
        """Write the attention of every request's queries to ``out``."""
        spec = self.spec
        assert q.stride(-1) == cache.key.stride(-1) == cache.value.stride(-1) == out.stride(-1) == 1
        num_requests = metadata.seq_lens.shape[0]
        d_padded = max(16, triton.next_power_of_2(spec.head_dim))
        block_m = self._rows(metadata.max_query_len, d_padded)
        block_q = max(1, block_m // self.group)
        num_tokens = q.shape[0]
        blocks = num_tokens // block_q + num_requests
        programs = blocks * spec.num_kv_heads
        few_queries = block_m == self.decode_rows
        splits = self._splits(programs, metadata.max_seq_len, q.device) if few_queries else 1
        parts = part_sums = None
        if splits > 1:
            rows = splits * num_tokens * spec.num_heads
            parts = torch.empty(rows, spec.head_dim, dtype=torch.float32, device=q.device)
            part_sums = torch.empty(rows, 2, dtype=torch.float32, device=q.device)
        _attention[blocks, spec.num_kv_heads, splits](
            q,
            cache.key,
            cache.value,
            out,
            sinks,
            parts,
            part_sums,
            self._arrivals if splits > 1 else None,
            metadata.query_start_loc,
            metadata.seq_lens,
            metadata.page_table,
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
            metadata.page_table.stride(0),
            PAGE=cache.page_size,
            GROUP=self.group,
            D=spec.head_dim,
            D_PADDED=d_padded,
            BLOCK_Q=block_q,
            BLOCK_M=block_m,
            BLOCK_N=self._keys_a_tile(d_padded, splits > 1),
            WINDOW=spec.window or 0,
            HAS_CAP=bool(spec.soft_cap),
            HAS_SINKS=sinks is not None,
            SPLITS=splits,
            OVERLAP=self.overlap,
            **launch_options(self.overlap),
        )
