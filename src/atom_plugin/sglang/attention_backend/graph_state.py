"""The batches of captured graphs: the same tensors for every replay, which each graph fills first.

So the host does nothing before a replay, and need not know the requests' lengths. A graph reads SGLang's static tensors
and SGLang's table of slots.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from atom_core.batch import Batch, Pages
from atom_core.kernels.request_pages import REQUEST_PAGES, RequestPagesSpec
from atom_core.kernels.select import KernelSet
from atom_plugin.sglang.attention_backend.batch import Shape

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

    from atom_plugin.sglang.attention_backend.kv_view import Pools

#: The length of a padded request: one token, which every kernel supports.
PADDED_LENGTH = 1

#: The batch of full layers and that of windowed layers.
Batches = tuple[Batch, Batch]


class GraphState:
    """Buffers for up to ``max_requests`` requests and ``max_tokens`` tokens, sliced by the size of each graph.

    Args:
        max_requests: requests of the largest graph.
        max_tokens: tokens of the largest graph.
        max_context: the longest sequence that is served.
        pools: of the runner.
        kernels: for its device.
        step: see :meth:`Shape.of`. A draft's step has slots of its own, for SGLang passes a slice.
    """

    def __init__(
        self, max_requests: int, max_tokens: int, max_context: int, pools: Pools, kernels: KernelSet, step: int = 0
    ) -> None:
        device = pools.req_to_token.device
        pages = pools.num_pages(max_context)
        self.pools, self.max_context, self.step = pools, max_context, step
        self.request_pages = kernels.select(REQUEST_PAGES, RequestPagesSpec(pools.page_size))
        self.seq_lens = torch.full((max_requests,), PADDED_LENGTH, dtype=torch.int32, device=device)
        # Kernels may read the table past a request's pages: its entries have to be page numbers.
        self.page_table = torch.zeros(max_requests, pages, dtype=torch.int32, device=device)
        self._ramp = torch.arange(max_requests + 1, dtype=torch.int32, device=device)
        self._starts: dict[int, torch.Tensor] = {1: self._ramp}
        self.slots = torch.zeros(max_tokens, dtype=torch.int64, device=device) if step else None
        self.windowed_slots = self.windowed_table = None
        if pools.hybrid:
            self.windowed_slots = torch.zeros(max_tokens, dtype=torch.int64, device=device)
            self.windowed_table = torch.zeros_like(self.page_table)
        self._plans: dict[Shape, Batches] = {}

    def plan(self, forward_batch: ForwardBatch, in_capture: bool) -> Batches:
        """The batches of a graph, when it is captured and before each replay."""
        shape = Shape.of(forward_batch, self.step)
        if in_capture:
            self._plans[shape] = self._plan(shape, forward_batch)
        full, windowed = self._plans[shape]
        full = replace(full)  # another step has an empty scratch
        return full, replace(windowed) if self.pools.hybrid else full

    def fill(self, forward_batch: ForwardBatch) -> None:
        """Fill the tensors, first in the graph of ``forward_batch``, whose tensors are the runner's static ones."""
        shape = Shape.of(forward_batch, self.step)
        count, num_tokens = shape.num_requests, shape.num_tokens
        slots = forward_batch.out_cache_loc[:num_tokens]
        if self.slots is not None:
            self.slots[:num_tokens].copy_(slots)
        windowed = None
        if self.windowed_table is not None and self.windowed_slots is not None:
            windowed = self.windowed_table[:count]
            self.windowed_slots[:num_tokens].copy_(self.pools.windowed_slots(slots))
        self.request_pages(
            self.pools.req_to_token,
            forward_batch.req_pool_indices[:count],
            forward_batch.seq_lens[:count],
            shape.added_tokens,
            self.seq_lens[:count],
            self.page_table[:count],
            self.pools.windowed_mapping,
            windowed,
        )

    def _plan(self, shape: Shape, forward_batch: ForwardBatch) -> Batches:
        count, num_tokens, queries_each = shape.num_requests, shape.num_tokens, shape.queries_each
        assert queries_each is not None, "only batches of equal requests are captured"
        decodes = count if queries_each == 1 else 0
        full = Batch(
            query_start_loc=self._query_start_loc(queries_each)[: count + 1],
            seq_lens=self.seq_lens[:count],
            pages=Pages(
                self.page_table[:count],
                (forward_batch.out_cache_loc if self.slots is None else self.slots)[:num_tokens],
            ),
            num_requests=count,
            num_tokens=num_tokens,
            max_query_len=queries_each,
            max_seq_len=self.max_context,
            num_decode_requests=decodes,
            num_decode_tokens=decodes,
        )
        if self.windowed_table is None or self.windowed_slots is None:
            return full, full
        table, slots = self.windowed_table[:count], self.windowed_slots[:num_tokens]
        return full, replace(full, pages=Pages(table, slots))

    def _query_start_loc(self, queries_each: int) -> torch.Tensor:
        if queries_each not in self._starts:
            self._starts[queries_each] = self._ramp * queries_each
        return self._starts[queries_each]
