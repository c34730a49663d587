"""Data parallelism of mixtures over vLLM's group: each rank has requests of its own, and some of the experts.

vLLM has all ranks take each step together, with an idle one running a batch of nothing, and announces how many tokens
each of them has. Within captured graphs all have the same number.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from vllm.forward_context import get_forward_context

from atom_plugin.common.padded import gather_padded

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
        if self._has_nccl(rows[0]):  # all of them in one launch
            return tuple(self.group.all_gatherv(list(rows), dim=0, sizes=counts))
        return tuple(gather_padded(self.group, each, counts) for each in rows)

    def reduce(self, x: torch.Tensor) -> torch.Tensor:
        """See :class:`atom_core.runtime.Replicas`."""
        counts = _counts()
        if self._has_nccl(x):
            reduced: torch.Tensor = self.group.reduce_scatterv(x, dim=0, sizes=counts)
            return reduced
        return self.group.all_reduce(x).split(counts)[self.rank]

    def _has_nccl(self, x: torch.Tensor) -> bool:
        """Whether vLLM exchanges different numbers of rows of ``x``.

        It does on GPUs alone, and by NCCL's own library: not where it has not found that, or ``VLLM_DISABLE_PYNCCL=1``
        is set. It asserts so without a word, so all is asked before.
        """
        nccl = getattr(self.group.device_communicator, "pynccl_comm", None)
        return x.is_cuda and nccl is not None and not nccl.disabled


def _counts() -> list[int]:
    """How many tokens each rank has in this step."""
    metadata = get_forward_context().dp_metadata
    assert metadata is not None, "vLLM announces the tokens of each data-parallel rank"
    counts: list[int] = metadata.num_tokens_across_dp_cpu.tolist()
    return counts
