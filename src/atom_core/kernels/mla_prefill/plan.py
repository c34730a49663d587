"""The requests of a batch whose latents are expanded, by the cost of both forms, and the chunks in which they are.

For ``m`` new tokens of a request of ``n``, with ``p`` (query, key) pairs under the causal mask, one head takes

    absorbed:  m L (N + V)  +  p (2 L + R)          expanded:  n L (N + V)  +  p (N + R + V)

multiplications. For a whole prompt the expanded form is always cheaper, for one token after a long context never. At
DeepSeek's sizes the costs are equal at about 170 new tokens. Both forms are correct for every request.

Expanded keys and values are larger than latents by the number of heads, so a chunk has as many keys as fit in
:data:`BUFFER_BYTES`; the pieces of a request follow one another. The plan is made on the host, once a step for all
layers, from lengths that the host has. Without them, or in a graph, nothing is expanded.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, groupby
from typing import Any

import torch

from atom_core.batch import Batch, HostLengths, Pages
from atom_core.cache import LatentCacheView
from atom_core.kernels.cache_dtypes import as_bytes
from atom_core.kernels.mla_cache import MlaSpec

#: Memory for the expanded keys and values of a chunk, unless :data:`MIN_KEYS` need more.
BUFFER_BYTES = 256 * 2**20
MIN_KEYS = 1024


@dataclass(frozen=True)
class Piece:
    """Some keys of one request: those at ``first .. first + count - 1``."""

    request: int
    first: int
    count: int


@dataclass(frozen=True, eq=False)
class Chunk:
    """Pieces that are expanded together. The tensors on the device have a row for each piece or each key."""

    pieces: tuple[Piece, ...]
    table: torch.Tensor
    """int32 ``[pieces, 6]``: the request's first query token, its number of queries and the position of the first; the
    first key's position, its row among the expanded keys, and the number of keys."""
    tile_starts: torch.Tensor
    """int32 ``[pieces]``: query tokens of the earlier pieces."""
    requests: torch.Tensor
    """int64 ``[keys]``: the request of each key."""
    positions: torch.Tensor
    """int64 ``[keys]``: the position of each key."""
    num_queries: int
    scratch: dict[str, Any] = field(default_factory=dict)
    """Kernels' results that are computed once a step."""
    _found: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)

    def places(self, page_table: torch.Tensor, page_size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The page of each key and its offset there, int64 ``[keys]``; computed once a step."""
        if page_size not in self._found:
            pages = page_table[self.requests, self.positions // page_size].long()
            self._found[page_size] = pages, self.positions % page_size
        return self._found[page_size]


@dataclass(frozen=True)
class Run:
    """Consecutive requests in absorbed form: their tokens ``begin .. end - 1``, as a batch."""

    begin: int
    end: int
    batch: Batch


@dataclass(frozen=True)
class PrefillPlan:
    """See the module."""

    host: HostLengths
    expanded: tuple[int, ...]
    """The requests whose latents are expanded."""
    chunks: tuple[Chunk, ...]
    absorbed: tuple[Run, ...]


def plan_prefill(batch: Batch, spec: MlaSpec) -> PrefillPlan | None:
    """The step's plan; None if no latents are expanded."""
    host = batch.host
    if host is None:
        return None
    new = [end - begin for begin, end in zip(host.starts, host.starts[1:], strict=False)]
    chosen = [
        request >= batch.num_decode_requests and expanding_is_cheaper(count, length, spec)
        for request, (count, length) in enumerate(zip(new, host.lengths, strict=True))
    ]
    expanded = tuple(request for request, is_chosen in enumerate(chosen) if is_chosen)
    if not expanded:
        return None
    chunks = cut(expanded, host.lengths, keys_per_chunk(spec))
    others = [list(run) for is_chosen, run in groupby(range(len(new)), key=chosen.__getitem__) if not is_chosen]
    return PrefillPlan(
        host=host,
        expanded=expanded,
        chunks=tuple(_on_device(pieces, host, new, batch.pages.table.device) for pieces in chunks),
        absorbed=tuple(_run(batch, host, run) for run in others if any(new[request] for request in run)),
    )


def gathered(chunk: Chunk, cache: LatentCacheView, batch: Batch, dtype: torch.dtype) -> torch.Tensor:
    """The chunk's cached rows ``[keys, L + R]``, multiplied by the cache's scale."""
    pages, offsets = chunk.places(batch.pages.table, cache.page_size)
    rows = as_bytes(cache.rows)[pages, offsets].view(cache.rows.dtype).to(dtype)
    return rows if cache.scale == 1.0 else rows * cache.scale


def keys_per_chunk(spec: MlaSpec) -> int:
    """The most keys of a chunk."""
    size = spec.num_heads * (spec.nope_dim + spec.value_dim) * spec.dtype.itemsize
    return max(MIN_KEYS, BUFFER_BYTES // size)


def expanding_is_cheaper(new: int, length: int, spec: MlaSpec) -> bool:
    """Whether the expanded form is cheaper for the last ``new`` of ``length`` tokens."""
    L, N, R, V = spec.rank, spec.nope_dim, spec.rope_dim, spec.value_dim
    pairs = new * length - new * (new - 1) // 2
    return length * L * (N + V) + pairs * (N + R + V) < new * L * (N + V) + pairs * (2 * L + R)


def cut(requests: Sequence[int], lengths: Sequence[int], max_keys: int) -> Iterator[tuple[Piece, ...]]:
    """All keys of ``requests`` in order, in chunks of ``max_keys``."""
    pieces: list[Piece] = []
    left = max_keys
    for request in requests:
        first = 0
        while first < lengths[request]:
            count = min(left, lengths[request] - first)
            pieces.append(Piece(request, first, count))
            first, left = first + count, left - count
            if left == 0:
                yield tuple(pieces)
                pieces, left = [], max_keys
    if pieces:
        yield tuple(pieces)


def _on_device(pieces: tuple[Piece, ...], host: HostLengths, new: Sequence[int], device: torch.device) -> Chunk:
    rows = [0, *accumulate(piece.count for piece in pieces)]
    queries = [0, *accumulate(new[piece.request] for piece in pieces)]
    table = [
        (host.starts[it.request], new[it.request], host.lengths[it.request] - new[it.request], it.first, row, it.count)
        for it, row in zip(pieces, rows, strict=False)
    ]
    counts = torch.tensor([piece.count for piece in pieces])
    whose = torch.tensor([piece.request for piece in pieces]).repeat_interleave(counts)
    shift = torch.tensor([piece.first - row for piece, row in zip(pieces, rows, strict=False)])
    positions = torch.arange(rows[-1]) + shift.repeat_interleave(counts)
    return Chunk(
        pieces,
        _copied(table, torch.int32, device),
        _copied(queries[:-1], torch.int32, device),
        whose.to(device, non_blocking=True),
        positions.to(device, non_blocking=True),
        queries[-1],
    )


def _copied(numbers: Sequence[object], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.tensor(numbers, dtype=dtype).to(device, non_blocking=True)


def _run(batch: Batch, host: HostLengths, requests: list[int]) -> Run:
    first, last = requests[0], requests[-1] + 1
    begin, end = host.starts[first], host.starts[last]
    decodes = min(max(batch.num_decode_requests - first, 0), len(requests))
    return Run(
        begin,
        end,
        replace(
            batch,
            query_start_loc=batch.query_start_loc[first : last + 1] - begin,
            # Copies, as Triton compiles kernels again for pointers of another alignment.
            seq_lens=batch.seq_lens[first:last].clone() if first else batch.seq_lens[:last],
            pages=Pages(
                batch.pages.table[first:last].clone() if first else batch.pages.table[:last],
                batch.pages.slots[begin:end],
            ),
            num_requests=len(requests),
            num_tokens=end - begin,
            max_query_len=max(host.starts[it + 1] - host.starts[it] for it in requests),
            max_seq_len=max(host.lengths[first:last]),
            num_decode_requests=decodes,
            num_decode_tokens=host.starts[first + decodes] - begin,
            host=None,
            plans={},
        ),
    )
