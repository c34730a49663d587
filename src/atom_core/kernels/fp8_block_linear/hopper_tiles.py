"""Which of Hopper's kernels multiplies few rows by a weight in blocks, and the tile of its programs.

Measured on an H200 with the products of Qwen3 8B, Qwen3.5 35B-A3B and DeepSeek V3, each behind what quantises its
input; docs/experiments.md has the times.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

from atom_core.kernels.linear.tiles import MAX_ROWS, MULTIPROCESSORS
from atom_core.kernels.triton_support import cdiv, next_power_of_2
from atom_core.quant.fp8 import BLOCK_SIZE

#: The most rows that these kernels multiply.
MOST_ROWS = 256
#: Rows of a weight that ``wgmma`` multiplies at once.
ROWS = 64
#: Shared memory of a multiprocessor for tiles and their scales, in bytes.
_SHARED = 222 * 1024


class BlockTile(NamedTuple):
    """A tile of :mod:`.few_rows_hopper`, with 64 rows of the weight."""

    tokens: int
    """Rows of the input."""
    stages: int
    """Tiles in flight, or being multiplied."""
    turn: int = 1
    """Tiles that are multiplied between waits."""


class SpecializedTile(NamedTuple):
    """A tile of :mod:`.specialized_hopper`, with 64 rows of the weight."""

    tokens: int
    """Rows of the input."""


def input_rows(num_rows: int) -> int:
    """Rows of the input that one program takes, of ``num_rows``, unless they are shared out."""
    return int(max(8, next_power_of_2(num_rows)))


@functools.lru_cache(maxsize=4096)
def tile_for(num_rows: int, out_features: int, activated: bool) -> BlockTile | SpecializedTile | None:
    """The tile of a product of up to :data:`MOST_ROWS` rows, or None if cuBLAS may be faster.

    ``activated``: whether gates are activated, which :mod:`.specialized_hopper` does not do.
    """
    tiles, tokens = cdiv(out_features, ROWS), input_rows(num_rows)
    if not activated:
        # Fewer rows a program make more programs. That pays for very few tiles, though weights are read more often.
        most = 32 if tiles <= MULTIPROCESSORS // 4 else MAX_ROWS
        for taken in dict.fromkeys((min(most, tokens), min(MAX_ROWS, tokens))):
            if tiles * cdiv(num_rows, taken) <= MULTIPROCESSORS:
                return SpecializedTile(taken)
    return _several_at_once(tokens, cdiv(tiles, MULTIPROCESSORS)) if num_rows <= MAX_ROWS else None


def _several_at_once(tokens: int, waves: int) -> BlockTile:
    """For so many waves of programs: up to three share a multiprocessor, so that there is one wave."""
    if waves > 3:
        return BlockTile(tokens, {32: 12, 64: 6}.get(tokens, 4), turn=2)
    stage = (ROWS + tokens) * (BLOCK_SIZE + 4)  # with its scales, in bytes
    turn = 2 if waves < 3 else 1
    return BlockTile(tokens, min(12, _SHARED // waves // stage) // turn * turn, turn)
