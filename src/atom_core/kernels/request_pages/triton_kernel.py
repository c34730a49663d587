"""Lengths and page tables in Triton: several programs share a request's pages, and read only the pages that it has.

The launch precedes a step's first kernel, which waits for all of it, so later kernels do too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from atom_core.kernels.launch import entry_kernel
from atom_core.kernels.triton_support import cdiv

if TYPE_CHECKING:
    from atom_core.kernels.request_pages import RequestPagesSpec

#: Pages of a block, which a program reads at once.
_BLOCK = 1024
#: The most programs of a request, and about the most of all requests.
_MAX_PROGRAMS, _PROGRAMS = 32, 2048


@entry_kernel
@triton.jit(do_not_specialize=["added"])
def _request_pages(
    slots,
    rows,
    seq_lens,
    mapping,
    lengths,
    table,
    windowed,
    added,
    stride_slots,
    stride_table,
    stride_windowed,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    length = tl.load(seq_lens + request).to(tl.int32) + added
    if tl.program_id(1) == 0:
        tl.store(lengths + request, length)
    mine = slots + tl.load(rows + request).to(tl.int64) * stride_slots
    count = tl.cdiv(length, PAGE)
    for begin in tl.range(tl.program_id(1) * BLOCK, count, tl.num_programs(1) * BLOCK):
        place = begin + tl.arange(0, BLOCK)
        known = place < count
        page = tl.load(mine + place * PAGE, mask=known, other=0) // PAGE
        tl.store(table + request * stride_table + place, page, mask=known)
        if mapping is not None:
            moved = tl.load(mapping + page.to(tl.int64) * PAGE, mask=known, other=0) // PAGE
            tl.store(windowed + request * stride_windowed + place, moved.to(tl.int32), mask=known)


class TritonRequestPages:
    """See :class:`atom_core.kernels.request_pages.RequestPagesKernel`."""

    def __init__(self, spec: RequestPagesSpec) -> None:
        self.page_size = spec.page_size

    def __call__(
        self,
        slots: torch.Tensor,
        rows: torch.Tensor,
        seq_lens: torch.Tensor,
        added: int,
        lengths: torch.Tensor,
        table: torch.Tensor,
        mapping: torch.Tensor | None = None,
        windowed: torch.Tensor | None = None,
    ) -> None:
        """See :class:`atom_core.kernels.request_pages.RequestPagesKernel`."""
        assert (mapping is None) == (windowed is None)
        assert all(
            it is None or it.stride(-1) == 1 for it in (slots, rows, seq_lens, lengths, table, mapping, windowed)
        )
        requests, columns = table.shape
        if not requests:
            return
        each = max(1, min(_MAX_PROGRAMS, _PROGRAMS // requests, cdiv(columns, _BLOCK)))
        _request_pages[(requests, each)](
            slots,
            rows,
            seq_lens,
            mapping,
            lengths,
            table,
            windowed,
            added,
            slots.stride(0),
            table.stride(0),
            0 if windowed is None else windowed.stride(0),
            PAGE=self.page_size,
            BLOCK=_BLOCK,
            num_warps=4,
        )
