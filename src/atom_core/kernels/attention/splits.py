"""Splits of a request's keys among several programs (split-KV), for batches whose programs are too few for the GPU.

Each program stores its partial output and softmax statistics; the last one to finish merges them (FlashDecoding,
https://crfm.stanford.edu/2023/10/12/flashdecoding.html).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from atom_core.batch import capturing
from atom_core.kernels.triton_support import multiprocessors

#: Programs that keep a large GPU busy, the most splits of a request, and the fewest keys of a split.
_PROGRAMS, MAX_SPLITS, _KEYS = 512, 32, 64
#: The cost of starting a program and merging its split, as a fraction of the time for all keys of a request.
_OVERHEAD = 0.04


@dataclass(frozen=True)
class Splits:
    """The splits of one launch. The tensors are None if ``count`` is 1."""

    count: int
    partials: torch.Tensor | None = None
    """float32 ``[count, rows, D]``: weighted values of each split, not divided by the softmax's sum."""
    stats: torch.Tensor | None = None
    """float32 ``[count, rows, 2]``: each split's largest logit, to the base 2, and its softmax's sum."""
    arrivals: torch.Tensor | None = None
    """int32, a counter of finished programs for each group of them; zero between launches."""


class SplitBuffers:
    """The counters of one layer's kernel, which outlive a launch.

    Args:
        fill_once: how many programs a multiprocessor runs at a time, so that more run in several waves; 0: unknown.
    """

    def __init__(self, fill_once: int = 0) -> None:
        self.fill_once = fill_once
        # Made on the first run outside of a graph: all frameworks have a warm-up.
        self._arrivals: torch.Tensor | None = None

    def share(self, programs: int, max_seq_len: int, rows: int, head_dim: int, device: torch.device) -> Splits:
        """The splits of a launch.

        Args:
            programs: their number without splits.
            max_seq_len: an upper bound of the requests' lengths in tokens.
            rows: query tokens times heads.
            head_dim: ``D``.
            device: the GPU.
        """
        return self.of(count_splits(programs, max_seq_len, device, self.fill_once), rows, head_dim, device)

    def of(self, count: int, rows: int, head_dim: int, device: torch.device) -> Splits:
        """``count`` splits, or one where there are no counters yet; otherwise as :meth:`share`."""
        if count < 2:
            return Splits(1)
        if self._arrivals is None:
            if capturing(device):
                return Splits(1)  # counters that a graph makes are zero only after the graph has run
            self._arrivals = torch.zeros(_PROGRAMS, dtype=torch.int32, device=device)
        return Splits(count, *empty_partials(count, rows, head_dim, device), self._arrivals)


def empty_partials(count: int, rows: int, head_dim: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """``partials`` and ``stats`` of :class:`Splits`, uninitialised."""
    partials = torch.empty(count, rows, head_dim, dtype=torch.float32, device=device)
    return partials, torch.empty(count, rows, 2, dtype=torch.float32, device=device)


def count_splits(programs: int, max_seq_len: int, device: torch.device, fill_once: int = 0) -> int:
    """The number of splits of each request; see :class:`SplitBuffers`."""
    count = min(_PROGRAMS // max(programs, 1), -(-max_seq_len // _KEYS), MAX_SPLITS)
    if not fill_once or count < 2:
        return max(count, 1)
    return best_split_count(programs, count, fill_once * multiprocessors(device))


@functools.lru_cache(maxsize=4096)
def best_split_count(programs: int, max_splits: int, places: int) -> int:
    """The fastest number of splits, up to ``max_splits``, of ``programs``, of which ``places`` run at a time.

    A wave takes the time of one split plus a fixed overhead.
    """
    return min(range(1, max_splits + 1), key=lambda count: -(-programs * count // places) * (1 / count + _OVERHEAD))
