"""Which kernel multiplies few rows, and its tile."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Literal

import torch

from atom_core.kernels import tuned

#: Of an H100 SXM or H200.
MULTIPROCESSORS = 132
#: Largest number of rows for our kernels; torch multiplies more, except in 16 bits by a small weight (MOST_ROWS).
MAX_ROWS = 64
MOST_ROWS = 256
#: Largest number of rows for which a program on Hopper may have fewer weight rows than ``wgmma`` multiplies at once.
SPLIT_ROWS = 16
#: Largest number of rows for 16-bit weights on GPUs other than Hopper.
_MAX_WIDE_ROWS = 16

#: One row element by element, with weight tiles in registers ("row") or in shared memory ("ring"); several rows, on any
#: GPU ("rows"); one or several on Hopper ("hopper").
Kernel = Literal["row", "ring", "rows", "hopper"]

#: Versions of Triton with whose experimental Gluon the Hopper kernel is known to compile.
_GLUON = ((3, 6), (3, 9))


def why_no_gluon() -> str | None:
    """None where the Hopper kernels can be compiled, else the reason."""
    import triton  # which a CPU may lack

    found = tuple(int(part) for part in triton.__version__.split(".")[:2])
    if not _GLUON[0] <= found <= _GLUON[1]:
        return f"The kernel for Hopper is known to compile with Triton 3.6 to 3.9, not with {triton.__version__}."
    return "Triton's interpreter runs no Gluon." if triton.knobs.runtime.interpret else None


@dataclass(frozen=True)
class Tile:
    """A kernel and the tile of one of its programs."""

    kernel: Kernel
    rows: int
    """Rows of the weight."""
    columns: int
    """Columns of the weight per step."""
    warps: int
    stages: int = 1
    """Tiles in flight."""
    early: bool = False
    """Whether the next kernel may start once all programs have started, rather than once they are done."""
    fetch: int = 0
    """Bytes of a row after its first tile that are prefetched into the L2 cache while the previous kernel runs."""
    tokens: int = 0
    """Input rows of a program on Hopper; 0: all."""
    split: int = 1
    """Splits of each row that a program on Hopper multiplies side by side, because ``wgmma`` takes 64 rows."""

    def input_rows(self, num_rows: int) -> int:
        """Rows of the input that one program takes, of ``num_rows``."""
        padded = 1 << (num_rows - 1).bit_length()
        if self.kernel == "hopper":
            return self.tokens or max(8, padded)
        return max(16, padded) if self.kernel == "rows" else 1

    @property
    def norms(self) -> bool:
        """Whether the kernel can apply an RMS norm to its input."""
        return self.kernel in ("row", "ring")

    def fetched(self, weight: torch.Tensor, overlap: bool) -> int:
        """The bytes of :attr:`fetch` that apply to this weight on this device."""
        import triton  # which a CPU may lack

        if not overlap or triton.knobs.runtime.interpret:
            return 0  # without the instruction
        left = (weight.shape[1] - self.columns) * weight.itemsize
        return max(0, min(self.fetch, left)) if weight.stride(0) * weight.itemsize % 16 == left % 16 == 0 else 0


#: Rows from which a weight is taken for an LM head.
_HEAD = 65536
#: The Hopper kernel needs rows of a multiple of this many bytes.
_HOPPER_BYTES = 256
#: Largest weight in bytes that is read in about the time in which a kernel starts and ends.
_SMALL_BYTES = 16 << 20
#: The Hopper kernel multiplies one row, too, where a 16-bit weight has more than so many bytes, and at most so many
#: inputs or outputs: one of them is the hidden size, unless the weight is a shard. A step of one request of Qwen3 0.6B,
#: 1.7B, 4B, 8B and 30B-A3B then takes 2, 9, 15, 9 and 2% less on an H200, though norms are launches of their own. With
#: both kinds of kernels it may take 5% more. With a hidden size of 5,120 Qwen3 14B gains 1.5%, and Qwen3.5 27B loses
#: 1.7%.
_ONE_ROW_BYTES, _ONE_ROW_SIDE = 4 << 20, 4096
#: Largest number of outputs for which a weight is taken for a router's, of 512 experts and a gate of shared ones. It is
#: split for more rows than others, which makes steps of 32 to 192 requests of DeepSeek V2-Lite, V3 and Qwen3 30B-A3B
#: 0.2 to 0.5% faster on an H100. Those have up to 256 outputs, and programs for two waves of one a multiprocessor.
_ROUTER, _TWO_WAVES = 528, 2 * MULTIPROCESSORS


def tile_for(
    num_rows: int, out_features: int, in_features: int, itemsize: int, nvidia: bool, hopper: bool = False
) -> Tile | None:
    """The tile of a product, on an H200 within a few per cent of the best of 60 in a chain of Qwen3 0.6B's and 8B's.

    None: torch is as fast or faster.
    """
    if num_rows > MAX_ROWS and not (hopper and itemsize == 2):
        return None
    if hopper and out_features < _HEAD and (num_rows > 1 or _takes_one_row(out_features, in_features, itemsize)):
        if in_features * itemsize % _HOPPER_BYTES == 0:
            return _hopper_tile(num_rows, out_features, in_features, itemsize)
        if itemsize == 2 and 1 < num_rows <= 16 and in_features * itemsize % (_HOPPER_BYTES // 2) == 0:
            return Tile("hopper", 64, 64, 4, 20, early=True)
    if itemsize == 1:
        if not nvidia:
            return Tile("rows", 32, 256, 4, 2)
        if out_features >= 16384:
            return Tile("rows", 64, 128, 4, 4)
        return Tile("rows", 64, 256, 4, 5 if num_rows <= 16 else 4)
    if num_rows > _MAX_WIDE_ROWS:
        # For 32 and 64 rows of DeepSeek V3's head an H200 takes with torch 461 and 497 us, with this tile 430 and 444.
        deep = hopper and out_features >= _HEAD and in_features >= 4096 and in_features % 128 == 0
        return Tile("rows", 128, 128, 4, 4) if deep and num_rows <= MAX_ROWS else None
    if num_rows > 1 or out_features >= _HEAD:
        if not nvidia:
            return Tile("rows", 32, 256, 4, 2)
        if out_features >= 16384:
            return Tile("rows", 64, 128, 4, 3)
        return Tile("rows", 32, 128, 4, 6) if in_features > 4096 else Tile("rows", 64, 128, 4, 5, early=True)
    if not nvidia:
        return Tile("row", 4, 1024, 4)
    if out_features * in_features * itemsize <= _SMALL_BYTES:
        whole = in_features * itemsize
        if out_features > in_features:
            return Tile("row", 4, 512, 2, early=True, fetch=whole)
        if in_features > 2048:
            return Tile("row", 8, 1024, 4, early=True, fetch=whole)
        return Tile("row", 2, max(128, 1 << (in_features - 1).bit_length()), 4, early=True)
    if out_features >= 16384:
        # A last tile that is half empty costs a sixth of the time of 5,120 columns.
        return Tile("ring", 4, 2048, 4, 2) if in_features % 2048 == 0 else Tile("row", 4, 1024, 4, early=True)
    if out_features <= 4096 and in_features <= 4096:
        return Tile("ring", 4, 1024, 2, 2, early=True)
    return Tile("row", 16 if out_features >= 4096 else 8, 1024, 8, early=True)


def _takes_one_row(out_features: int, in_features: int, itemsize: int) -> bool:
    """Whether the Hopper kernel multiplies one row by a weight whose columns are whole steps of it."""
    large = itemsize == 2 and out_features * in_features * itemsize > _ONE_ROW_BYTES
    return large and min(out_features, in_features) <= _ONE_ROW_SIDE


def _hopper_tile(num_rows: int, out_features: int, in_features: int, itemsize: int) -> Tile | None:
    """Chosen in steps of the whole 8B: a chain of products says little about ``early``.

    With fewer rows, more tiles fit.
    """
    stages = 10 if num_rows <= 16 else 8 if num_rows <= 32 else 7
    widens = out_features > in_features
    if itemsize == 1:
        if out_features < 16384:
            if num_rows <= 16:
                return Tile("hopper", 64, 256, 4, stages, early=in_features <= 4096)
            return Tile("hopper", 64, 256, 4, stages - 2 if widens else stages, early=widens)
        if num_rows <= 16:
            return Tile("hopper", 64, 256, 4, 6)
        return Tile("hopper", 128, 128, 4, 5) if num_rows <= 32 else Tile("rows", 64, 128, 4, 4)
    if num_rows <= SPLIT_ROWS and not widens and (tile := _split_tile(num_rows, out_features, in_features)):
        return tile
    if in_features % (4 * 128) == 0 and _is_router(num_rows, out_features):
        return Tile("hopper", 16, 128, 4, 6, early=True, tokens=16, split=4)
    small = out_features * in_features * itemsize <= _SMALL_BYTES
    if num_rows > MAX_ROWS or (num_rows > 32 and small and not widens):
        return _split_input_tile(num_rows, out_features, in_features) if small else None
    if num_rows > 32 and in_features > 2048:
        return Tile("hopper", 64, 128, 4, stages) if widens and out_features < 16384 else None
    if out_features >= 16384:
        if num_rows > 16:
            return Tile("hopper", 128, 64, 4, 5)
        return Tile("hopper", 64, 128, 4, 12 if num_rows <= 8 else 10, early=num_rows == 1)
    return Tile("hopper", 64, 128, 4, stages, early=True)


def _is_router(num_rows: int, out_features: int) -> bool:
    """Whether a weight of so many outputs is split for more than 16 rows, a program for 16 of each."""
    programs = -(-out_features // 16) * -(-num_rows // 16)
    return out_features <= 256 or (out_features <= _ROUTER and programs <= _TWO_WAVES)


def _split_tile(num_rows: int, out_features: int, in_features: int) -> Tile | None:
    """For few outputs, where 64 per program would leave most multiprocessors idle.

    In steps of the 0.6B, the 8B, 30B-A3B and DeepSeek V2-Lite with two to sixteen requests, it is the best of some 40
    or within 1% of it, but 2 to 3% slower for 1,024 x 3,072 and up to 4 rows.
    """
    split = 4 if out_features <= min(2048, in_features // 2) else 2
    if out_features > 4096 or in_features % (split * 128):
        return None
    stages = {4: (8, 6), 2: (10, 8)}[split][num_rows > 8]
    return Tile("hopper", 64 // split, 128, 4, stages, early=True, split=split)


def _split_input_tile(num_rows: int, out_features: int, in_features: int) -> Tile | None:
    """For a small weight in 16 bits; chosen in steps of the whole 0.6B and of DeepSeek V2-Lite's layers."""
    if out_features <= in_features:
        # As many programs as multiprocessors, since the L2 bandwidth of each is limited.
        if num_rows <= MAX_ROWS:
            return Tile("hopper", 64, 128, 4, 10, early=True, tokens=16)
        if num_rows * out_features <= 256 * 1024:
            return Tile("hopper", 64, 128, 4, 8, early=True, tokens=32)
        return Tile("hopper", 64, 128, 4, 6, early=True, tokens=64)
    if in_features > 1024:
        return Tile("hopper", 64, 128, 4, 6, early=True, tokens=64) if num_rows <= 128 else None
    if num_rows <= 128:
        return Tile("hopper", 64, 64, 4, 8, early=True, tokens=128)
    return Tile("hopper", 128, 64, 8, 6, early=True, tokens=128)


#: In a file of tuned tiles: torch's product is the fastest.
TORCH = {"kernel": "torch"}
#: The tiles of :func:`tried`.
_TRIED: ContextVar[Mapping[tuned.Shape, Tile | None]] = ContextVar("tried", default=MappingProxyType({}))


@contextmanager
def tried(tiles: Mapping[tuned.Shape, Tile | None]) -> Iterator[None]:
    """For a search of the fastest tiles: inside, products of these shapes use these tiles; None: torch."""
    token = _TRIED.set(tiles)
    try:
        yield
    finally:
        _TRIED.reset(token)


def chosen_tile(x: torch.Tensor, weight: torch.Tensor, nvidia: bool) -> Tile | None:
    """The tile for ``x [M, K]`` and ``weight [N, K]``: the fastest measured on this device, or the default.

    None: torch computes the product.
    """
    num_rows, (out_features, in_features) = x.shape[0], weight.shape
    if not 0 < num_rows <= MOST_ROWS:
        return None
    hopper = on_hopper(x.device) and aligned(x) and aligned(weight)
    dtype = str(weight.dtype).removeprefix("torch.")
    of_a_search = _TRIED.get()
    if of_a_search and (shape := tuned.Shape(num_rows, out_features, in_features, dtype)) in of_a_search:
        return of_a_search[shape]
    return _chosen_tile(_device_name(x.device), num_rows, out_features, in_features, dtype, nvidia, hopper)


def tile_key(
    num_rows: int, out_features: int, in_features: int, dtype: torch.dtype, nvidia: bool, device: torch.device
) -> tuple[Tile, int] | None:
    """What the product of :func:`chosen_tile`, of rows that are :func:`aligned`, is compiled for; None: it is torch's.

    See :mod:`atom_core.kernels.compile_keys`.
    """
    if not 0 < num_rows <= MOST_ROWS:
        return None
    hopper, name = on_hopper(device) and in_features % 16 == 0, str(dtype).removeprefix("torch.")
    tile = _chosen_tile(_device_name(device), num_rows, out_features, in_features, name, nvidia, hopper)
    return None if tile is None else (tile, tile.input_rows(num_rows))


@functools.lru_cache(maxsize=4096)
def _chosen_tile(
    device: str, num_rows: int, out_features: int, in_features: int, dtype: str, nvidia: bool, hopper: bool
) -> Tile | None:
    found = tuned.lookup(Path(__file__).parent, device, num_rows, out_features, in_features, dtype)
    if found == TORCH:
        return None
    if found is not None and (hopper or found["kernel"] != "hopper"):
        return Tile(**found)
    return tile_for(num_rows, out_features, in_features, getattr(torch, dtype).itemsize, nvidia, hopper)


@functools.lru_cache
def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


@functools.lru_cache
@functools.lru_cache  # each product asks for it, also in eager steps
def on_hopper(device: torch.device) -> bool:
    """Whether the device is a Hopper GPU for which the Hopper kernels can be compiled."""
    nvidia = device.type == "cuda" and torch.version.hip is None
    return nvidia and torch.cuda.get_device_capability(device) == (9, 0) and why_no_gluon() is None


def aligned(matrix: torch.Tensor) -> bool:
    """Whether Triton knows that rows are aligned to 16 bytes: it specialises arguments that are multiples of 16."""
    return matrix.data_ptr() % 16 == 0 and matrix.stride(0) % 16 == 0
