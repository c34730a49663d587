"""A framework's parallel group as the core's Communicator.

vLLM's and SGLang's groups have a common ancestor, so their methods have the same names and work in captured graphs.
"""

from __future__ import annotations

import functools
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, TypeVar

import torch

from atom_core.kernels.all_reduce_norm.peer_memory import PeerMemory

T = TypeVar("T")

Place = tuple[str, str]
"""A rank's host and the UUID of its GPU."""


class Group(Protocol):
    """The used part of a ``GroupCoordinator``."""

    rank_in_group: int
    world_size: int
    device_group: torch.distributed.ProcessGroup
    cpu_group: torch.distributed.ProcessGroup
    device: torch.device

    def all_reduce(self, input_: torch.Tensor) -> torch.Tensor: ...

    def all_gather(self, input_: torch.Tensor, dim: int = -1) -> torch.Tensor: ...


class GroupCommunicator:
    """The core's Communicator over one group.

    Args:
        group: the framework's.
        reads_peers: whether ranks may read each other's memory, as the framework's custom all-reduce does.
    """

    def __init__(self, group: Group, *, reads_peers: bool = True) -> None:
        self.group = group
        self.reads_peers = reads_peers
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
        rows = x.movedim(dim, 0).contiguous()
        result = rows.new_empty(rows.shape[0] // self.world_size, *rows.shape[1:])
        torch.distributed.reduce_scatter_tensor(result, rows, group=self.group.device_group)
        return result.movedim(0, dim)

    def all_to_all(self, x: torch.Tensor, send: list[int], receive: list[int]) -> torch.Tensor:
        """See :class:`atom_core.runtime.Communicator`."""
        result = x.new_empty(sum(receive), *x.shape[1:])
        torch.distributed.all_to_all_single(result, x, receive, send, group=self.group.device_group)
        return result

    def why_no_peer_memory(self) -> str | None:
        """See :class:`atom_core.runtime.Communicator`."""
        return self._why_no_peer_memory

    @functools.cached_property
    def _why_no_peer_memory(self) -> str | None:
        if self.world_size == 1 or self.group.device.type != "cuda":
            return "It needs several GPUs that can read each other's memory."
        if not self.reads_peers:
            return "--disable-custom-all-reduce prevents ranks from reading each other's memory."
        places = self._gather_objects((_host(), _gpu(self.group.device)))
        # Each rank checks its own GPU. If one rank fails, no rank uses peer memory.
        return next((reason for reason in self._gather_objects(why_out_of_reach(self.rank, places)) if reason), None)

    def _gather_objects(self, mine: T) -> list[T]:
        found: list[T] = [mine] * self.world_size
        torch.distributed.all_gather_object(found, mine, group=self.group.cpu_group)
        return found

    @functools.cached_property
    def peer_memory(self) -> PeerMemory:
        """See :class:`atom_core.runtime.Communicator`."""
        return PeerMemory(self.group.device_group, self.rank, self.group.device)


def _host() -> str:
    """An identifier of this process's machine and container."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{socket.gethostname()} {boot.read_text().strip() if boot.exists() else ''}"


def _gpu(device: torch.device) -> str:
    return str(torch.cuda.get_device_properties(device).uuid)


def why_out_of_reach(rank: int, places: Sequence[Place]) -> str | None:
    """Why the GPU of ``rank`` cannot read the memory of all ranks, which are at ``places``; None if it can."""
    host, mine = places[rank]
    if any(theirs != host for theirs, _ in places):
        return "The ranks are on several hosts, whose GPUs do not read each other's memory."
    seen = {_gpu(torch.device("cuda", index)): index for index in range(torch.cuda.device_count())}
    for peer, (_, theirs) in enumerate(places):
        if theirs not in seen:
            return f"Rank {rank} does not see the GPU of rank {peer}: CUDA_VISIBLE_DEVICES must be the same for both."
        if theirs == mine:
            if peer != rank:
                return f"Ranks {rank} and {peer} share a GPU."
        elif not torch.cuda.can_device_access_peer(seen[mine], seen[theirs]):
            return f"The GPU of rank {rank} cannot read the memory of the GPU of rank {peer} (no peer-to-peer access)."
    return None
