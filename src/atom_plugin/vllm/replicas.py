"""Data parallelism of mixtures over vLLM's group: each rank has requests of its own, and some of the experts.

vLLM has all ranks take each step together, with an idle one running a batch of nothing, and announces how many tokens
each of them has. Within captured graphs all have the same number.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from vllm.forward_context import get_forward_context

if TYPE_CHECKING:
    from vllm.distributed.parallel_state import GroupCoordinator


class VllmReplicas:
    """See :class:`atom_core.runtime.Replicas`."""

    def __init__(self, group: GroupCoordinator) -> None:
        self.group = group
        self.rank: int = group.rank_in_group
        self.world_size: int = group.world_size

    def gather(self, *rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """See :class:`atom_core.runtime.Replicas`."""
        counts = _counts()
        assert all(len(each) == counts[self.rank] for each in rows), (counts, self.rank, [len(each) for each in rows])
        if rows[0].is_cuda:
            return tuple(self.group.all_gatherv(list(rows), dim=0, sizes=counts))
        return tuple(self._gather_padded(each, counts) for each in rows)

    def _gather_padded(self, rows: torch.Tensor, counts: list[int]) -> torch.Tensor:
        """vLLM gathers different numbers of rows on GPUs alone."""
        most = max(counts)
        padded = rows.new_zeros(most, *rows.shape[1:])
        padded[: len(rows)] = rows
        parts = self.group.all_gather(padded, dim=0).split(most)
        return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])

    def reduce(self, x: torch.Tensor) -> torch.Tensor:
        """See :class:`atom_core.runtime.Replicas`."""
        counts = _counts()
        if x.is_cuda:
            reduced: torch.Tensor = self.group.reduce_scatterv(x, dim=0, sizes=counts)
            return reduced
        return self.group.all_reduce(x).split(counts)[self.rank]


def _counts() -> list[int]:
    """How many tokens each rank has in this step."""
    metadata = get_forward_context().dp_metadata
    assert metadata is not None, "vLLM announces the tokens of each data-parallel rank"
    counts: list[int] = metadata.num_tokens_across_dp_cpu.tolist()
    return counts
