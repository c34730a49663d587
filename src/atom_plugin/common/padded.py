"""Gathering different numbers of rows over a group that exchanges only equal numbers."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from atom_plugin.common.communicator import Group


def gather_padded(group: Group, rows: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
    """All ranks' rows in the order of ranks.

    Args:
        group: the ranks.
        rows: this rank's, ``[sizes[rank], ...]``, of any dtype that the group gathers.
        sizes: the number of rows of each rank; the same list on all ranks.

    Returns:
        ``[sum(sizes), ...]``
    """
    most = max(sizes)
    padded = rows
    if len(rows) < most:
        padded = rows.new_zeros(most, *rows.shape[1:])
        padded[: len(rows)] = rows
    gathered = group.all_gather(padded, dim=0)
    if min(sizes) == most:
        return gathered
    return torch.cat([each[:size] for each, size in zip(torch.split(gathered, most), sizes, strict=True)])
