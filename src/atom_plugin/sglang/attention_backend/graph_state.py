"""The metadata of steps inside captured graphs: the same tensors for every replay, refilled in place before it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from atom_core.metadata import AttentionMetadata
from atom_plugin.sglang.attention_backend.metadata import Shape, longest

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

    from atom_plugin.sglang.attention_backend.kv_view import Pools

#: The length of a padded request: one token, which every kernel can take.
PADDED_LENGTH = 1


class GraphState:
    """Buffers for up to ``max_requests`` requests and ``max_tokens`` tokens, sliced by the size of each graph.

    Args:
        max_requests: requests of the largest graph.
        max_tokens: tokens of the largest graph.
        max_context: the longest sequence that is served.
        pools: of the runner.
        step: see :meth:`Shape.of`. A draft's step has slots of its own here, for SGLang hands it a slice of others.
    """

    def __init__(self, max_requests: int, max_tokens: int, max_context: int, pools: Pools, step: int = 0) -> None:
        device = pools.req_to_token.device
        pages = pools.num_pages(max_context)
        self.pools, self.max_context, self.step = pools, max_context, step
        self.seq_lens = torch.full((max_requests,), PADDED_LENGTH, dtype=torch.int32, device=device)
        self.page_table = torch.zeros(max_requests, pages, dtype=torch.int32, device=device)
        self._ramp = torch.arange(max_requests + 1, dtype=torch.int32, device=device)
        self._starts: dict[int, torch.Tensor] = {1: self._ramp}
        self.slots = torch.zeros(max_tokens, dtype=torch.int64, device=device) if step else None
        self.windowed_slots = self.windowed_table = None
        if pools.hybrid:
            self.windowed_slots = torch.zeros(max_tokens, dtype=torch.int64, device=device)
            self.windowed_table = torch.zeros_like(self.page_table)

    def fill(self, batch: ForwardBatch) -> tuple[AttentionMetadata, AttentionMetadata]:
        """Refill for ``batch``, whose tensors are the runner's static ones: metadata for full and windowed layers."""
        shape = Shape.of(batch, self.step)
        assert shape.queries_each is not None, "only batches of equal requests are captured"
        count = shape.num_requests
        seq_lens, table = self.seq_lens[:count], self.page_table[:count]
        torch.add(batch.seq_lens[:count], shape.added_tokens, out=seq_lens)
        max_seq_len = longest(batch, shape, self.max_context)
        current = self.pools.page_table(batch.req_pool_indices[:count], max_seq_len)
        table[:, : current.shape[1]] = current
        num_tokens = count * shape.queries_each
        metadata = AttentionMetadata(
            query_start_loc=self._query_start_loc(shape.queries_each)[: count + 1],
            seq_lens=seq_lens,
            page_table=table,
            slot_mapping=self._slots(batch.out_cache_loc[:num_tokens]),
            num_requests=count,
            num_tokens=num_tokens,
            max_query_len=shape.queries_each,
            max_seq_len=self.max_context,
            num_decode_requests=count if shape.queries_each == 1 else 0,
            num_decode_tokens=count if shape.queries_each == 1 else 0,
        )
        return metadata, self._windowed(metadata, current)

    def _slots(self, slots: torch.Tensor) -> torch.Tensor:
        return slots if self.slots is None else self.slots[: slots.shape[0]].copy_(slots)

    def _query_start_loc(self, queries_each: int) -> torch.Tensor:
        if queries_each not in self._starts:
            self._starts[queries_each] = self._ramp * queries_each
        return self._starts[queries_each]

    def _windowed(self, metadata: AttentionMetadata, current: torch.Tensor) -> AttentionMetadata:
        if self.windowed_table is None or self.windowed_slots is None:
            return metadata
        table = self.windowed_table[: metadata.num_requests]
        table[:, : current.shape[1]] = self.pools.windowed_table(current)
        slots = self.windowed_slots[: metadata.num_tokens]
        slots.copy_(self.pools.windowed_slots(metadata.slot_mapping))
        return replace(metadata, page_table=table, slot_mapping=slots)
