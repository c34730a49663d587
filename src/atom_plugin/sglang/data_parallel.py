"""Data-parallel attention of mixtures: each attention group serves its own requests; all groups split the experts.

In SGLang all ranks take each step together, idle ranks too. SGLang announces how many rows each attention group has:
its tokens and, in some steps, padding. In captured graphs all groups have the same number.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

import torch
from sglang.srt.layers.dp_attention import get_dp_global_num_tokens

from atom_plugin.common.padded import gather_padded

if TYPE_CHECKING:
    from sglang.srt.distributed.parallel_state import GroupCoordinator

#: Rows that a model runs where its group has none: kernels take no empty tensors. Their results are not used.
STAND_IN = 1


class SglangDataParallelGroup:
    """See :class:`atom_core.runtime.DataParallelGroup`.

    SGLang has no group with one rank of each attention group. The ranks of an attention group have the same rows, so
    each rank exchanges a slice of them over the whole tensor-parallel group, which is ordered by attention group.
    :meth:`reduce` gives each rank the sum for its slice and 0 elsewhere. The all-reduce over the attention group that
    follows completes the rows.

    Args:
        group: the tensor-parallel group of all ranks.
        width: ranks of an attention group.
        announced: returns the number of rows of each attention group in this step.
    """

    def __init__(
        self, group: GroupCoordinator, width: int, announced: Callable[[], Sequence[int]] = get_dp_global_num_tokens
    ) -> None:
        self.group, self.width, self.announced = group, width, announced
        self.global_rank: int = group.rank_in_group
        self.rank, self.world_size = self.global_rank // width, group.world_size // width

    def gather(self, *rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """See :class:`atom_core.runtime.DataParallelGroup`."""
        counts = self._counts()
        expected = counts[self.rank] or STAND_IN
        assert all(len(each) == expected for each in rows), (counts, self.rank, [len(each) for each in rows])
        if not any(counts):
            return rows
        slices = _slices(counts, self.width)
        mine, sizes = slices[self.global_rank], [len(it) for it in slices]
        given = [each[mine.start : mine.stop].contiguous() for each in rows]
        if self._has_nccl(given[0]):  # one launch for all tensors
            return tuple(self.group.all_gatherv(given, sizes=sizes))
        return tuple(gather_padded(self.group, each, sizes) for each in given)

    def reduce(self, x: torch.Tensor) -> torch.Tensor:
        """See :class:`atom_core.runtime.DataParallelGroup`, and the class for attention groups of several ranks."""
        counts = self._counts()
        if not any(counts):
            return x
        slices = _slices(counts, self.width)
        count, mine = counts[self.rank], slices[self.global_rank]
        summed = self._reduce(x.contiguous(), [len(it) for it in slices])
        if len(mine) == count > 0:
            return summed
        own = x.new_zeros(count or STAND_IN, *x.shape[1:])
        own[mine.start : mine.stop] = summed
        return own

    def _counts(self) -> list[int]:
        counts = list(self.announced())
        assert len(counts) == self.world_size, (counts, self.world_size)
        return counts

    def _has_nccl(self, x: torch.Tensor) -> bool:
        """Whether SGLang exchanges different numbers of rows of ``x`` without padding.

        It needs the NCCL library for that; without it, it exchanges equal numbers through torch.
        """
        nccl = self.group.pynccl_comm
        return x.is_cuda and nccl is not None and bool(nccl.available)

    def _reduce(self, x: torch.Tensor, sizes: list[int]) -> torch.Tensor:
        """This rank's rows of the sum of ``x`` over ranks; each rank has as many as ``sizes`` says."""
        if x.is_cuda and min(sizes) == max(sizes):
            summed = x.new_empty(sizes[self.global_rank], *x.shape[1:])
            self.group.reduce_scatter_tensor(summed, x)
            return summed
        if self._has_nccl(x):
            varied: torch.Tensor = self.group.reduce_scatterv(x, sizes=sizes)
            return varied
        return self.group.all_reduce(x).split(sizes)[self.global_rank]


def _slices(counts: Sequence[int], width: int) -> list[range]:
    """The rows of its group that each rank exchanges; groups have ``counts`` rows and ``width`` ranks."""
    slices = []
    for count in counts:
        sizes = [(count + width - 1 - rank) // width for rank in range(width)]
        slices += [range(end - size, end) for size, end in zip(sizes, accumulate(sizes), strict=True)]
    return slices
