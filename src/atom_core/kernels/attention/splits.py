"""How many programs share a request's keys where few of them leave a GPU idle, and where they meet.

Each stores its part of the softmax and of the sum; the last to arrive adds the parts up ("flash decoding",
https://crfm.stanford.edu/2023/10/12/flashdecoding.html).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from atom_core.batch import capturing
from atom_core.kernels.triton_support import multiprocessors

#: Programs that keep a large GPU busy, at most how many share a request's keys, and the fewest keys that are shared.
_PROGRAMS, MAX_SPLITS, _KEYS = 512, 32, 64
#: What starting a program and adding its part up cost, as a share of all keys of a request.
_OVERHEAD = 0.04


@dataclass(frozen=True)
class Splits:
    """Of one launch: float32 ``parts [count, rows, D]`` and ``sums [count, rows, 2]``; None where the count is 1."""

    count: int
    parts: torch.Tensor | None = None
    sums: torch.Tensor | None = None
    arrivals: torch.Tensor | None = None
    """int32, for each group of programs how many have arrived; zero between launches."""


class SplitBuffers:
    """What outlives a launch of one layer's kernel.

    Args:
        fill_once: whether a multiprocessor has one program at a time: more than there are run one after the other.
    """

    def __init__(self, fill_once: bool = False) -> None:
        self.fill_once = fill_once
        # Made on the first run outside of graphs, which all frameworks warm up with.
        self._arrivals: torch.Tensor | None = None

    def share(self, programs: int, max_seq_len: int, rows: int, head_dim: int, device: torch.device) -> Splits:
        """How a launch shares keys.

        Args:
            programs: as many as there are without sharing.
            max_seq_len: tokens of the longest request that may come.
            rows: query tokens times heads.
            head_dim: ``D``.
            device: where it runs.
        """
        count = count_parts(programs, max_seq_len, device, self.fill_once)
        if count < 2:
            return Splits(1)
        if self._arrivals is None:
            if capturing(device):
                return Splits(1)  # zeros that a graph makes are zeros only once that graph has run
            self._arrivals = torch.zeros(_PROGRAMS, dtype=torch.int32, device=device)
        return Splits(count, *empty_parts(count, rows, head_dim, device), self._arrivals)


def empty_parts(count: int, rows: int, head_dim: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """The parts and sums of :class:`Splits`."""
    parts = torch.empty(count, rows, head_dim, dtype=torch.float32, device=device)
    return parts, torch.empty(count, rows, 2, dtype=torch.float32, device=device)


def count_parts(programs: int, max_seq_len: int, device: torch.device, fill_once: bool = False) -> int:
    """Into how many parts the keys of a request go; see :meth:`SplitBuffers.share`."""
    count = min(_PROGRAMS // max(programs, 1), -(-max_seq_len // _KEYS), MAX_SPLITS)
    return fewest_turns(programs, count, multiprocessors(device)) if fill_once and count > 1 else max(count, 1)


@functools.lru_cache(maxsize=4096)
def fewest_turns(programs: int, most: int, places: int) -> int:
    """Into how many parts, up to ``most``, the keys of each of ``programs`` go that run on ``places`` at a time.

    A turn takes as long as a part, and a little that no sharing makes shorter.
    """
    return min(range(1, most + 1), key=lambda count: -(-programs * count // places) * (1 / count + _OVERHEAD))
