"""Lengths and page tables in torch, for all columns of the tables."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from atom_core.kernels.request_pages import RequestPagesSpec


class ReferenceRequestPages:
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
        torch.add(seq_lens, added, out=lengths)
        pages = slots[:, : table.shape[1] * self.page_size : self.page_size][rows] // self.page_size
        table[:, : pages.shape[1]] = pages
        if mapping is not None and windowed is not None:
            windowed[:, : pages.shape[1]] = mapping[pages.long() * self.page_size] // self.page_size
