"""A step's lengths and page tables, from a pool that knows the slot of every token of every request, as SGLang's do.

``slots``: int32 ``[rows, tokens]``, a row for each request that may be served, and a page's tokens in order. The step's
request ``r`` has row ``rows[r]`` and, with the ``added`` tokens of this step, ``seq_lens[r] + added`` tokens. It gets
its length and, from ``table[r, 0]`` on, its pages. A pool whose older tokens move to another one, for layers with a
window, says by ``mapping`` where a slot is there; those pages go to ``windowed``.

All of it happens on the device at the same shapes, so a captured graph can begin with it. What a table has behind a
request's own pages is not written, or is another number of a page.
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
    """Tokens a page."""


class RequestPagesKernel(Protocol):
    """See the module's text."""

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
