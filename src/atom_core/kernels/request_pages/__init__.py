"""A step's lengths and page tables, from a pool with the slot of every token of every request, as SGLang's.

``slots``: int32 ``[rows, tokens]``, a row for each request of the pool, with the tokens of a page in order. The step's
request ``r`` has row ``rows[r]``, and ``seq_lens[r] + added`` tokens: ``added`` are those of this step. Its length goes
to ``lengths[r]``, its pages to ``table[r]``. Layers with a window may have another pool: ``mapping`` has the slot there
for each slot here, and the pages there go to ``windowed``.

It runs on the device at fixed shapes, so a captured graph can begin with it. Table entries after a request's pages are
not written, or are some page's number.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from atom_core.kernels.request_pages.reference import ReferenceRequestPages
from atom_core.kernels.select import Implementation, Op, Target, always
from atom_core.kernels.triton_support import why_no_triton


@dataclass(frozen=True)
class RequestPagesSpec:
    """One pool."""

    page_size: int
    """Tokens of a page."""


class RequestPagesKernel(Protocol):
    """See the module."""

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
        """Write to ``lengths``, int32 ``[R]``, and ``table`` and ``windowed``, int32 ``[R, pages]``.

        ``rows`` and ``seq_lens``: integers ``[R]``; ``mapping``: integers, one for each slot.
        """


def _triton_supports(spec: RequestPagesSpec, target: Target) -> str | None:
    return why_no_triton(target)


def _build_triton(spec: RequestPagesSpec, target: Target) -> RequestPagesKernel:
    from atom_core.kernels.request_pages.triton_kernel import TritonRequestPages  # needs triton, which a CPU may lack

    return TritonRequestPages(spec)


REQUEST_PAGES: Op[RequestPagesSpec, RequestPagesKernel] = Op(
    "request_pages",
    (
        Implementation("triton", _triton_supports, _build_triton),
        Implementation("reference", always, lambda spec, target: ReferenceRequestPages(spec)),
    ),
)
