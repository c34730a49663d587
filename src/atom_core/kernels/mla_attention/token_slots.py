"""The slot of every key of a batch whose requests have equally many tokens, for kernels without page tables.

It is filled on the device in one launch shape for all lengths: a captured graph that contains the launch refills it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from atom_core.batch import Batch
from atom_core.kernels.launch import entry_kernel
from atom_core.kernels.triton_support import cdiv

#: Keys of a program, and lengths that it sums at a time.
_KEYS, _LENGTHS = 1024, 1024


@dataclass(frozen=True, eq=False)
class TokenSlots:
    """``R`` requests of ``queries_each`` tokens; all int32."""

    queries_each: int
    query_starts: torch.Tensor
    """``[R + 1]``, with the padded requests, which have tokens too."""
    key_starts: torch.Tensor
    """``[R + 1]``: each request's keys in ``slots``. A padded request has as many keys as tokens, in any page."""
    slots: torch.Tensor
    """``[R * max_keys]``: page * page size + offset of each key, request by request; the rest is uninitialised."""
    ones: torch.Tensor
    """``[R]`` ones: to aiter a token is a page, and this is the number of tokens in each last page."""


@entry_kernel
@triton.jit(do_not_specialize=["num_requests", "queries_each", "max_keys", "num_pages"])
def _token_slots(
    seq_lens,
    page_table,
    query_starts,
    key_starts,
    slots,
    ones,
    num_requests,
    queries_each,
    max_keys,
    num_pages,
    stride_table,
    PAGE: tl.constexpr,
    KEYS: tl.constexpr,
    LENGTHS: tl.constexpr,
):
    request = tl.program_id(0)
    first = tl.program_id(1) * KEYS
    length = tl.minimum(tl.maximum(tl.load(seq_lens + request), queries_each), max_keys)
    if first >= length:
        return
    begin = 0
    for start in range(0, request, LENGTHS):
        other = start + tl.arange(0, LENGTHS)
        before = other < request
        found = tl.load(seq_lens + other, mask=before, other=0)
        found = tl.minimum(tl.maximum(found, queries_each), max_keys)
        begin += tl.sum(tl.where(before, found, 0), 0)
    if first == 0:
        tl.store(query_starts + request, request * queries_each)
        tl.store(key_starts + request, begin)
        tl.store(ones + request, 1)
        if request == num_requests - 1:
            tl.store(query_starts + num_requests, num_requests * queries_each)
            tl.store(key_starts + num_requests, begin + length)
    key = first + tl.arange(0, KEYS)
    known = key < length
    row = page_table + request.to(tl.int64) * stride_table
    # Padded requests may have invalid pages.
    page = tl.minimum(tl.maximum(tl.load(row + key // PAGE, mask=known, other=0), 0), num_pages - 1)
    tl.store(slots + begin + key, page * PAGE + key % PAGE, mask=known)


def token_slots(batch: Batch, queries_each: int, num_pages: int, page_size: int) -> TokenSlots:
    """The slots of a batch's keys.

    Args:
        batch: the batch; its page table is wide enough for the longest request.
        queries_each: tokens of each request. There are ``R * queries_each`` rows of queries, with the padded ones.
        num_pages: pages of the cache.
        page_size: tokens of a page.
    """
    lengths, table = batch.seq_lens, batch.pages.table
    requests, max_keys = lengths.shape[0], table.shape[1] * page_size
    assert lengths.dtype == table.dtype == torch.int32
    assert lengths.stride(0) == table.stride(1) == 1

    def empty(size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.int32, device=lengths.device)

    found = TokenSlots(
        queries_each, empty(requests + 1), empty(requests + 1), empty(requests * max_keys), empty(requests)
    )
    fill = fill_on_host if lengths.device.type == "cpu" else fill_on_device
    fill(found, lengths, table, num_pages, page_size)
    return found


def fill_on_device(
    found: TokenSlots, lengths: torch.Tensor, table: torch.Tensor, num_pages: int, page_size: int
) -> None:
    """Fill it in one launch."""
    requests, max_keys = lengths.shape[0], table.shape[1] * page_size
    _token_slots[requests, cdiv(max_keys, _KEYS)](
        lengths,
        table,
        found.query_starts,
        found.key_starts,
        found.slots,
        found.ones,
        requests,
        found.queries_each,
        max_keys,
        num_pages,
        table.stride(0),
        PAGE=page_size,
        KEYS=_KEYS,
        LENGTHS=_LENGTHS,
        num_warps=4,
    )


def fill_on_host(found: TokenSlots, lengths: torch.Tensor, table: torch.Tensor, num_pages: int, page_size: int) -> None:
    """Fill it by torch: the definition."""
    requests, max_keys = lengths.shape[0], table.shape[1] * page_size
    lengths = lengths.clamp(found.queries_each, max_keys)
    found.query_starts.copy_(torch.arange(requests + 1) * found.queries_each)
    found.key_starts[0] = 0
    found.key_starts[1:] = lengths.cumsum(0)
    found.ones.fill_(1)
    key = torch.arange(max_keys)
    slots = table.clamp(0, num_pages - 1)[:, key // page_size] * page_size + key % page_size
    slots = slots[key < lengths[:, None]]
    found.slots[: len(slots)] = slots
