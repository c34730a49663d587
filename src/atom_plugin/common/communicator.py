"""A framework's parallel group as the core's Communicator.

vLLM's and SGLang's groups have a common ancestor: the same names, and collectives that survive captured graphs.
"""

from __future__ import annotations

from typing import Protocol

import torch


class Group(Protocol):
    """What is used of a ``GroupCoordinator``."""

    rank_in_group: int
    world_size: int
    device_group: torch.distributed.ProcessGroup

    def all_reduce(self, input_: torch.Tensor) -> torch.Tensor: ...

    def all_gather(self, input_: torch.Tensor, dim: int = -1) -> torch.Tensor: ...


class GroupCommunicator:
    """The core's Communicator over one group."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self.rank: int = group.rank_in_group
        self.world_size: int = group.world_size

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """See :class:`atom_core.runtime.Communicator`."""
        return x if self.world_size == 1 else self.group.all_reduce(x)

    def all_gather(self, x: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """See :class:`atom_core.runtime.Communicator`."""
        return x if self.world_size == 1 else self.group.all_gather(x, dim)

    def reduce_scatter(self, x: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """See :class:`atom_core.runtime.Communicator`."""
        if self.world_size == 1:
            return x
        parts = x.movedim(dim, 0).contiguous()
        result = parts.new_empty(parts.shape[0] // self.world_size, *parts.shape[1:])
        torch.distributed.reduce_scatter_tensor(result, parts, group=self.group.device_group)
        return result.movedim(0, dim)

    def all_to_all(self, x: torch.Tensor, send: list[int], receive: list[int]) -> torch.Tensor:
        """See :class:`atom_core.runtime.Communicator`."""
        result = x.new_empty(sum(receive), *x.shape[1:])
        torch.distributed.all_to_all_single(result, x, receive, send, group=self.group.device_group)
        return result
