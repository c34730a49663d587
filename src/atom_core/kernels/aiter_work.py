"""What aiter's persistent kernels are told: which compute unit reads what of a batch, and where parts of one meet.

A function of aiter's says how large these are, another fills them on the device. In a captured graph that stands in the
graph itself, in the graph's memory: it is refilled by each replay, and never moves.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

#: Of each tensor of :class:`Work`, as aiter tells them.
Sizes = tuple[tuple[int | tuple[int, ...], torch.dtype], ...]


class Work(NamedTuple):
    """In the order of ``get_mla_metadata_info_v1`` and ``get_pa_metadata_info_v1``."""

    pointers: torch.Tensor
    """uint64 ``[2]``: the addresses of the next two."""
    starts: torch.Tensor
    work: torch.Tensor
    sum_starts: torch.Tensor
    sums: torch.Tensor
    parts: torch.Tensor

    @classmethod
    def empty(cls, sizes: Sizes, device: torch.device) -> Work:
        """Room for it."""
        return cls(*(torch.empty(size, dtype=dtype, device=device) for size, dtype in sizes))
