"""A chunk of expanded keys as calls of a kernel that only has causal attention of whole ranges of queries and keys.

In a causal range the last query sees the last key, and each query before it sees one key less. A request with all its
keys in the chunk is such a range; all of them are one call. For a request that is cut, the queries that see all keys of
the piece are a range without a mask, and those that end in it a causal range; the partial outputs are merged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch

from atom_core.kernels.mla_prefill.plan import Chunk, Piece, PrefillPlan


@dataclass(frozen=True, eq=False)
class RangesCall:
    """One call, with equally many ranges of queries and of keys."""

    queries: tuple[tuple[int, int], ...]
    """Tokens of the step, ``begin .. end - 1`` of each range."""
    keys: tuple[int, int]
    """Rows of the chunk, for all ranges together."""
    query_starts: torch.Tensor
    """int32 ``[ranges + 1]``, in the call's queries."""
    key_starts: torch.Tensor
    """int32 ``[ranges + 1]``, in the call's keys."""
    max_queries: int
    max_keys: int
    causal: bool
    whole: bool
    """The queries see no other keys."""


def calls_of(chunk: Chunk, plan: PrefillPlan, device: torch.device) -> tuple[RangesCall, ...]:
    """The calls of a chunk, computed once a step for all layers."""
    key = "ranges"
    if key not in chunk.scratch:
        chunk.scratch[key] = tuple(_calls(chunk.pieces, plan, device))
    found: tuple[RangesCall, ...] = chunk.scratch[key]
    return found


def _calls(pieces: Sequence[Piece], plan: PrefillPlan, device: torch.device) -> list[RangesCall]:
    starts, lengths = plan.host.starts, plan.host.lengths
    rows = [0, *accumulate(piece.count for piece in pieces)]
    whole = [at for at, it in enumerate(pieces) if it.count == lengths[it.request]]
    calls = []
    if whole:
        assert whole == list(range(whole[0], whole[-1] + 1)), "only the first and the last piece can be cut"
        queries = tuple((starts[pieces[at].request], starts[pieces[at].request + 1]) for at in whole)
        bounds = [rows[at] for at in whole] + [rows[whole[-1] + 1]]
        calls.append(_call(queries, bounds, True, True, device))
    for at, piece in enumerate(pieces):
        if at in whole:
            continue
        length, end = lengths[piece.request], piece.first + piece.count
        last = starts[piece.request + 1]
        # The positions of the first query, the first that sees any of these keys, and the first that sees all of them.
        first = length - (last - starts[piece.request])
        seeing, beyond = max(first, piece.first), max(first, end)
        bounds = [rows[at], rows[at + 1]]
        token = last - length
        if beyond < length:
            calls.append(_call(((token + beyond, last),), bounds, False, False, device))
        if seeing < end:
            calls.append(_call(((token + seeing, token + end),), bounds, True, False, device))
    return calls


def _call(
    queries: tuple[tuple[int, int], ...], bounds: Sequence[int], causal: bool, whole: bool, device: torch.device
) -> RangesCall:
    counts = [end - begin for begin, end in queries]
    starts = [0, *accumulate(counts)]
    key_starts = [bound - bounds[0] for bound in bounds]
    return RangesCall(
        queries,
        (bounds[0], bounds[-1]),
        torch.tensor(starts, dtype=torch.int32).to(device, non_blocking=True),
        torch.tensor(key_starts, dtype=torch.int32).to(device, non_blocking=True),
        max(counts),
        max(end - begin for begin, end in pairwise(bounds)),
        causal,
        whole,
    )
