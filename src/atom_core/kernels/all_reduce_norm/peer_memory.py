"""Memory of each rank that the other ranks' kernels access, with counters by which programs wait for each other.

It is torch's symmetric memory: every rank of a process group allocates the same size and gets the others' addresses.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

#: The most programs of a launch. All have to run at once on any server GPU, as each waits for the program of the same
#: number on the other ranks.
PROGRAMS = 64
#: Bytes between two programs' counters: no two share a cache line.
COUNTER_PITCH = 128
#: The offset of the programs' shares in bytes.
SHARES = PROGRAMS * COUNTER_PITCH
#: Bytes of one half of a program's share. A program alternates between its halves, so a rank that is one launch ahead
#: writes to the half that no other rank still reads.
HALF = 32 * 1024
SIZE = SHARES + PROGRAMS * 2 * HALF


@dataclass(frozen=True)
class Peers:
    """The arguments of the kernel."""

    rank: int
    addresses: torch.Tensor
    """int64 ``[ranks]``: the address of each rank's memory."""
    rounds: torch.Tensor
    """int32 ``[PROGRAMS]``: how often each program of this rank has waited for the others; it wraps around."""

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return len(self.addresses)


class PeerMemory:
    """The peer memory of a group, for all norms of one model.

    Args:
        group: a process group with a backend for GPUs.
        rank: this rank in the group.
        device: this rank's GPU.
    """

    def __init__(self, group: torch.distributed.ProcessGroup, rank: int, device: torch.device) -> None:
        self.group, self.rank, self.device = group, rank, device
        self._memory: torch.Tensor | None = None
        self._peers: Peers | None = None

    def peers(self) -> Peers:
        """The ranks' memory. All ranks have to make the first call, which allocates it, outside of a graph capture.

        Raises:
            ValueError: torch cannot share memory between these GPUs.
        """
        if self._peers is None:
            self._peers = self._allocate()
        return self._peers

    def _allocate(self) -> Peers:
        from torch.distributed import _symmetric_memory as symmetric  # only needed with several ranks

        assert not torch.cuda.is_current_stream_capturing(), "the warm-up before a capture allocates the memory"
        try:
            memory = symmetric.empty(SIZE, dtype=torch.uint8, device=self.device)
            memory.zero_()
            # The rendezvous below waits for all ranks, so no rank clears a counter that another has incremented.
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
