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
        mine = parts[self.place]
        return tuple(self._gather(each[mine.start : mine.stop], [len(part) for part in parts]) for each in rows)

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

    def _gather(self, part: torch.Tensor, sizes: list[int]) -> torch.Tensor:
        """The parts of all ranks, of ``sizes`` rows."""
        if len(set(sizes)) == 1:
            gathered = part.new_empty(sum(sizes), *part.shape[1:])
            self._all_gather(gathered, part.contiguous())
            return gathered
        if self._takes_sizes(part):
            varied: torch.Tensor = self.group.all_gatherv(part.contiguous(), sizes=sizes)
            return varied
        most = max(sizes)
        padded, gathered = (part.new_zeros(count * most, *part.shape[1:]) for count in (1, len(sizes)))
        padded[: len(part)] = part
        self._all_gather(gathered, padded)
        return torch.cat([each[:size] for each, size in zip(gathered.split(most), sizes, strict=True)])

    def _reduce(self, x: torch.Tensor, sizes: list[int]) -> torch.Tensor:
        """This rank's part of the sum, of which the ranks have ``sizes`` rows."""
        if len(set(sizes)) == 1:
            summed = x.new_empty(sizes[self.place], *x.shape[1:])
            self._reduce_scatter(summed, x)
            return summed
        if self._takes_sizes(x):
            varied: torch.Tensor = self.group.reduce_scatterv(x, sizes=sizes)
            return varied
        most = max(sizes)
        padded = x.new_zeros(len(sizes) * most, *x.shape[1:])
        for place, (part, size) in enumerate(zip(x.split(sizes), sizes, strict=True)):
            padded[place * most : place * most + size] = part
        summed = x.new_empty(most, *x.shape[1:])
        self._reduce_scatter(summed, padded)
        return summed[: sizes[self.place]]

    def _all_gather(self, gathered: torch.Tensor, part: torch.Tensor) -> None:
        if part.is_cuda:
            self.group.all_gather_into_tensor(gathered, part)
        else:  # for which SGLang's group has these two only with an engine of its own
            torch.distributed.all_gather_into_tensor(gathered, part, group=self.group.device_group)

    def _reduce_scatter(self, summed: torch.Tensor, x: torch.Tensor) -> None:
        if x.is_cuda:
            self.group.reduce_scatter_tensor(summed, x)
        else:
            torch.distributed.reduce_scatter_tensor(summed, x, group=self.group.device_group)

    def _takes_sizes(self, x: torch.Tensor) -> bool:
        """Whether SGLang exchanges different numbers of rows without padding: by NCCL alone."""
        return x.is_cuda and self.group.pynccl_comm is not None


def _parts(counts: Sequence[int], width: int) -> list[range]:
    """Of each rank, which of its group's rows it exchanges; groups have ``counts`` rows and ``width`` ranks."""
    parts = []
    for count in counts:
        sizes = [(count + width - 1 - place) // width for place in range(width)]
        parts += [range(end - size, end) for size, end in zip(sizes, accumulate(sizes), strict=True)]
    return parts
