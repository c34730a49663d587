"""Hand-written lengths and page tables of requests, for every implementation of the op."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from atom_core.kernels.request_pages import RequestPagesKernel

#: The value of elements that nothing may write to.
UNTOUCHED = -7


@dataclass(frozen=True)
class PagesCase:
    """Requests of ``lengths`` tokens after ``added`` ones, in rows of a pool that are theirs in any order."""

    lengths: tuple[int, ...]
    page_size: int = 1
    added: int = 0
    windowed: bool = False


CASES = {
    "one token": PagesCase((1,)),
    "none but what is added": PagesCase((4, 9), added=4),
    "a page filled, one begun": PagesCase((16, 17, 15), page_size=16),
    "pages of 64, added tokens": PagesCase((64, 129, 700), page_size=64, added=3),
    "more than a program reads at once": PagesCase((2500, 1, 1025)),
    "two pools": PagesCase((5, 30), windowed=True),
    "two pools, pages of 16": PagesCase((5, 300, 16), page_size=16, windowed=True),
    "many": PagesCase(tuple(range(1, 301)), page_size=4),
}


class Requests:
    """A case's tensors; :meth:`check` runs a kernel on them."""

    def __init__(self, case: PagesCase, device: torch.device | str = "cpu", seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.case, page = case, case.page_size
        count, self.columns = len(case.lengths), -(-max(case.lengths) // page) + 2
        num_pages = count * self.columns + 1
        # A token's slot is its place on one of its request's pages, which are any.
        pages = torch.randperm(num_pages, generator=generator)[: count * self.columns].view(count, -1)
        slots = (pages[..., None] * page + torch.arange(page)).flatten(1).int()
        self.rows = torch.randperm(count + 3, generator=generator)[:count]
        self.slots = torch.randint(0, num_pages * page, (count + 3, slots.shape[1]), generator=generator).int()
        self.slots[self.rows] = slots
        moved = torch.randperm(num_pages, generator=generator)
        self.mapping = (moved[:, None] * page + torch.arange(page)).flatten()
        self.pages, self.moved = pages, moved
        self.seq_lens = torch.tensor(case.lengths) - case.added
        for name in ("slots", "rows", "seq_lens", "mapping"):
            setattr(self, name, getattr(self, name).to(device))
        self.lengths = torch.full((count,), UNTOUCHED, dtype=torch.int32, device=device)
        self.table = torch.full((count, self.columns), UNTOUCHED, dtype=torch.int32, device=device)
        self.windowed = torch.full_like(self.table, UNTOUCHED) if case.windowed else None

    def run(self, kernel: RequestPagesKernel) -> None:
        """Once."""
        moved = (self.mapping, self.windowed) if self.case.windowed else (None, None)
        kernel(self.slots, self.rows, self.seq_lens, self.case.added, self.lengths, self.table, *moved)

    def check(self) -> None:
        """Check what was written; entries past a request's pages are valid page numbers or untouched."""
        assert self.lengths.tolist() == list(self.case.lengths)
        tables = [(self.table, self.pages)]
        if self.windowed is not None:
            tables.append((self.windowed, self.moved[self.pages]))
        for table, expected in tables:
            for found, pages, length in zip(table.tolist(), expected.tolist(), self.case.lengths, strict=True):
                count = -(-length // self.case.page_size)
                assert found[:count] == pages[:count]
                assert set(found[count:]) <= {UNTOUCHED, *pages}
