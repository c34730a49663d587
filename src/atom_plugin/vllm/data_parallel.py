"""Data parallelism of mixtures over vLLM's group: each rank serves its own requests and has a share of the experts.

In vLLM all ranks take each step together; an idle rank runs an empty batch. vLLM announces how many tokens each rank
has. Within captured graphs all ranks have the same number.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from vllm.forward_context import get_forward_context

from atom_plugin.common.padded import gather_padded

if TYPE_CHECKING:
    from vllm.distributed.parallel_state import GroupCoordinator


class VllmDataParallelGroup:
    """See :class:`atom_core.runtime.DataParallelGroup`."""

    def __init__(self, group: GroupCoordinator) -> None:
        self.group = group
        self.rank: int = group.rank_in_group
        self.world_size: int = group.world_size

    def gather(self, *rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """See :class:`atom_core.runtime.DataParallelGroup`."""
        counts = _counts()
        assert all(len(each) == counts[self.rank] for each in rows), (counts, self.rank, [len(each) for each in rows])
        if self._has_nccl(rows[0]):  # one launch for all tensors
            return tuple(self.group.all_gatherv(list(rows), dim=0, sizes=counts))
        return tuple(gather_padded(self.group, each, counts) for each in rows)

    def reduce(self, x: torch.Tensor) -> torch.Tensor:
        """See :class:`atom_core.runtime.DataParallelGroup`."""
        counts = _counts()
        if self._has_nccl(x):
            reduced: torch.Tensor = self.group.reduce_scatterv(x, dim=0, sizes=counts)
            return reduced
        return self.group.all_reduce(x).split(counts)[self.rank]

    def _has_nccl(self, x: torch.Tensor) -> bool:
        """Whether vLLM can exchange different numbers of rows of ``x``.

        vLLM needs a GPU and the NCCL library for that, without ``VLLM_DISABLE_PYNCCL=1``. Otherwise its call fails by
        an assertion without a message.
        """
        nccl = getattr(self.group.device_communicator, "pynccl_comm", None)
        return x.is_cuda and nccl is not None and not nccl.disabled


def _counts() -> list[int]:
    """The number of tokens of each rank in this step."""
    metadata = get_forward_context().dp_metadata
    assert metadata is not None, "vLLM announces the tokens of each data-parallel rank"
    counts: list[int] = metadata.num_tokens_across_dp_cpu.tolist()
    return counts
