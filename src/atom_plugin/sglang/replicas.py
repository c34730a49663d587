"""Data-parallel attention of mixtures: attention groups have requests of their own, and share the experts.

SGLang has all ranks take each step together, an idle one too, and announces how many rows each attention group has:
those of its tokens, and in some steps rows that fill it up. In captured graphs all have the same number.
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

#: Rows that a model runs where its group has none, for kernels take no empty tensors; nobody sees them.
STAND_IN = 1


class SglangReplicas:
    """See :class:`atom_core.runtime.Replicas`.

    SGLang has no group of one rank from each attention group. But the ranks of an attention group have the same rows:
    each gives a part of them to the whole tensor-parallel group, whose ranks are in the order of attention groups.
    Likewise each is given the sum of its part of the rows, and leaves the other rows at 0; where a group's own
    parts are summed up, as those of its attention are, nothing is missing and nothing is there twice.

    Args:
        group: the tensor-parallel group of all ranks.
        width: ranks of an attention group.
        announced: tells how many rows each attention group has in this step.
    """

    def __init__(
        self, group: GroupCoordinator, width: int, announced: Callable[[], Sequence[int]] = get_dp_global_num_tokens
    ) -> None:
        self.group, self.width, self.announced = group, width, announced
        self.place: int = group.rank_in_group
        self.rank, self.world_size = self.place // width, group.world_size // width

    def gather(self, *rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """See :class:`atom_core.runtime.Replicas`."""
        counts = self._counts()
        expected = counts[self.rank] or STAND_IN
        assert all(len(each) == expected for each in rows), (counts, self.rank, [len(each) for each in rows])
        if not any(counts):
            return rows
        parts = _parts(counts, self.width)
        mine, sizes = parts[self.place], [len(part) for part in parts]
        given = [each[mine.start : mine.stop].contiguous() for each in rows]
        if self._has_nccl(given[0]):  # all of them in one launch
            return tuple(self.group.all_gatherv(given, sizes=sizes))
        return tuple(gather_padded(self.group, each, sizes) for each in given)

    def reduce(self, x: torch.Tensor) -> torch.Tensor:
        """See :class:`atom_core.runtime.Replicas`, and what is said here of attention groups of several ranks."""
        counts = self._counts()
        if not any(counts):
            return x
        parts = _parts(counts, self.width)
        count, mine = counts[self.rank], parts[self.place]
        summed = self._reduce(x.contiguous(), [len(part) for part in parts])
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

        It does by NCCL's own library, where it has found that; else it exchanges equal numbers, through torch.
        """
        nccl = self.group.pynccl_comm
        return x.is_cuda and nccl is not None and bool(nccl.available)

    def _reduce(self, x: torch.Tensor, sizes: list[int]) -> torch.Tensor:
        """This rank's part of the sum, of which the ranks have ``sizes`` rows."""
        if x.is_cuda and min(sizes) == max(sizes):
            summed = x.new_empty(sizes[self.place], *x.shape[1:])
            self.group.reduce_scatter_tensor(summed, x)
            return summed
        if self._has_nccl(x):
            varied: torch.Tensor = self.group.reduce_scatterv(x, sizes=sizes)
            return varied
        return self.group.all_reduce(x).split(sizes)[self.place]


def _parts(counts: Sequence[int], width: int) -> list[range]:
    """Of each rank, which of its group's rows it exchanges; groups have ``counts`` rows and ``width`` ranks."""
    parts = []
    for count in counts:
        sizes = [(count + width - 1 - place) // width for place in range(width)]
        parts += [range(end - size, end) for size, end in zip(sizes, accumulate(sizes), strict=True)]
    return parts
