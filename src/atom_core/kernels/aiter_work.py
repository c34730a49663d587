"""The metadata of aiter's persistent kernels: which keys each compute unit reads, and how partial results are reduced.

One aiter function returns the sizes of these tensors, another fills them on the device. In a captured graph they belong
to the graph: each replay fills the same memory again.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

#: (size, dtype) of each tensor of :class:`Work`, from aiter.
Sizes = tuple[tuple[int | tuple[int, ...], torch.dtype], ...]


class Work(NamedTuple):
    """In the order of ``get_mla_metadata_info_v1`` and ``get_pa_metadata_info_v1``."""

    pointers: torch.Tensor
    """uint64 ``[2]``: the addresses of the next two."""
    work_starts: torch.Tensor
    work: torch.Tensor
    reduce_starts: torch.Tensor
    reduce_final: torch.Tensor
    reduce_partial: torch.Tensor

    @classmethod
    def empty(cls, sizes: Sizes, device: torch.device) -> Work:
        """Uninitialised tensors of these sizes."""
        return cls(*(torch.empty(size, dtype=dtype, device=device) for size, dtype in sizes))
