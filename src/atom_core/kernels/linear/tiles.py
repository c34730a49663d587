"""Which kernel multiplies few rows, and what one of its programs takes."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import triton

from atom_core.kernels import tuned

#: Rows up to which our kernels multiply, more are torch's; and those where weight and input are FP8.
MAX_ROWS, MAX_FP8_ROWS = 16, 64

#: One row with tiles of the weight in registers or in shared memory, and several rows.
Kernel = Literal["row", "ring", "rows"]


@dataclass(frozen=True)
class Tile:
    """A kernel, and what one of its programs takes."""

    kernel: Kernel
    rows: int
    """Rows of the weight."""
    columns: int
    """Columns of it at a time."""
    warps: int
    stages: int = 1
    """How many tiles are on their way at once."""
    early: bool = False
    """Whether the next kernel may start when this one's programs all have, and not only when they are done."""

    @property
    def norms(self) -> bool:
        """Whether the kernel can norm its input."""
        return self.kernel != "rows"


#: Bytes of a weight that is read in about the time that a kernel takes to start and to end.
_SMALL_BYTES = 16 << 20


def tile_for(num_rows: int, out_features: int, in_features: int, itemsize: int, nvidia: bool) -> Tile:
    """The tile of a product; on an H200 within a few per cent of the best of 60 in a chain of Qwen3 0.6B's and 8B's."""
    if itemsize == 1:
        if not nvidia:
            return Tile("rows", 32, 256, 4, 2)
        if out_features >= 16384:
            return Tile("rows", 64, 128, 4, 4)
        return Tile("rows", 64, 256, 4, 5 if num_rows <= 16 else 4)
    if num_rows > 1 or out_features >= 65536:
        if not nvidia:
            return Tile("rows", 32, 256, 4, 2)
        if out_features >= 16384:
            return Tile("rows", 64, 128, 4, 3)
        return Tile("rows", 32, 128, 4, 6) if in_features > 4096 else Tile("rows", 64, 128, 4, 5, early=True)
    if not nvidia:
        return Tile("row", 4, 1024, 4)
    if out_features * in_features * itemsize <= _SMALL_BYTES:
        if out_features > in_features:
            return Tile("row", 4, 512, 2, early=True)
        if in_features > 2048:
            return Tile("row", 8, 1024, 4, early=True)
        return Tile("row", 2, max(128, triton.next_power_of_2(in_features)), 4, early=True)
    if out_features >= 16384:
        return Tile("ring", 4, 2048, 4, 2)
    if out_features <= 4096 and in_features <= 4096:
        return Tile("ring", 4, 2048, 4, 2, early=True)
    return Tile("row", 16 if out_features >= 4096 else 8, 1024, 8, early=True)


def chosen_tile(x: torch.Tensor, weight: torch.Tensor, nvidia: bool) -> Tile:
    """The tile for ``x [M, K]`` and ``weight [N, K]``: the one measured to be fastest here, or the default."""
    dtype = str(weight.dtype).removeprefix("torch.")
    return _chosen_tile(_device_name(x.device), x.shape[0], weight.shape[0], weight.shape[1], dtype, nvidia)


@functools.lru_cache(maxsize=4096)
def _chosen_tile(device: str, num_rows: int, out_features: int, in_features: int, dtype: str, nvidia: bool) -> Tile:
    found = tuned.lookup(Path(__file__).parent, device, num_rows, out_features, in_features, dtype)
    if found is not None:
        return Tile(**found)
    return tile_for(num_rows, out_features, in_features, getattr(torch, dtype).itemsize, nvidia)


@functools.lru_cache
def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
