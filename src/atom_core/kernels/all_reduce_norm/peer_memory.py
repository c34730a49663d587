"""Memory of each rank's that the others' kernels read and write, and the counters by which they wait for each other.

It is torch's symmetric memory: every rank of a process group allocates the same, and is told where the others' lies.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

#: Programs of one launch. All of them are on the GPU at once, whatever GPU of a server's it is: each waits for the
#: program of its number on the other ranks.
PROGRAMS = 64
#: Bytes between two programs' counters, so that no two share a cache line.
COUNTER_PITCH = 128
#: Where the programs' shares begin, in bytes.
SHARES = PROGRAMS * COUNTER_PITCH
#: Bytes of one half of a program's share. A program writes to its halves in turn: one rank that is a launch ahead
#: writes to the half that no other still reads.
HALF = 32 * 1024
SIZE = SHARES + PROGRAMS * 2 * HALF


@dataclass(frozen=True)
class Peers:
    """What the kernel is told."""

    rank: int
    addresses: torch.Tensor
    """int64 ``[ranks]``: where each rank's memory begins."""
    rounds: torch.Tensor
    """int32 ``[PROGRAMS]``: how often each program of this rank has met the others; it wraps around."""

    @property
    def world_size(self) -> int:
        """How many ranks there are."""
        return len(self.addresses)


class PeerMemory:
    """A group's, for all norms of one model.

    Args:
        group: of torch.distributed, with a backend for GPUs.
        rank: this rank's place in it.
        device: this rank's GPU.
    """

    def __init__(self, group: torch.distributed.ProcessGroup, rank: int, device: torch.device) -> None:
        self.group, self.rank, self.device = group, rank, device
        self._memory: torch.Tensor | None = None
        self._peers: Peers | None = None

    def peers(self) -> Peers:
        """The ranks' memory, which the first call allocates: all ranks make it, and none while it captures a graph.

        Raises:
            ValueError: torch can share no memory between these GPUs.
        """
        if self._peers is None:
            self._peers = self._allocate()
        return self._peers

    def _allocate(self) -> Peers:
        from torch.distributed import _symmetric_memory as symmetric  # what no rank needs that is alone

        assert not torch.cuda.is_current_stream_capturing(), "memory is allocated by the run before a capture"
        try:
            memory = symmetric.empty(SIZE, dtype=torch.uint8, device=self.device)
            memory.zero_()
            # Every rank is past this once all have met below, so no counter is cleared that was counted up.
            torch.cuda.synchronize(self.device)
            found = symmetric.rendezvous(memory, self.group)
        except RuntimeError as error:
            raise ValueError(
                "The Triton kernel of all_reduce_norm needs memory that the GPUs of a tensor-parallel group share, and "
                f"torch gives it none: {error} Set ATOM_KERNELS=all_reduce_norm=separate."
            ) from error
        self._memory = memory  # it is freed with this object
        return Peers(
            rank=self.rank,
            addresses=torch.tensor(found.buffer_ptrs, dtype=torch.int64, device=self.device),
            rounds=torch.zeros(PROGRAMS, dtype=torch.int32, device=self.device),
        )
