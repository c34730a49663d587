"""Tiles of the linear kernels that are worth a try on a GPU; :mod:`atom_plugin.bench.tune` finds the fastest."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from atom_core.kernels.linear.tiles import SPLIT_ROWS, Tile

#: Shared memory of one program, where torch does not tell.
SHARED_MEMORY = 64 << 10
#: Rows up to which all of the input can be one tile. With more a program takes a part: that pays for small weights.
_WHOLE_ROWS, _SMALL_BYTES = 64, 64 << 20
#: Tiles that have room in shared memory beyond those that are asked for ahead.
_SPARE = 2


def candidates(
    num_rows: int,
    out_features: int,
    in_features: int,
    shared_memory: int = SHARED_MEMORY,
    itemsize: int = 2,
    hopper: bool = False,
) -> list[Tile]:
    """Tiles worth a try for a product.

    Args:
        num_rows: of the input.
        out_features, in_features: the weight's.
        shared_memory: bytes that one program may have.
        itemsize: bytes of one number of the weight.
        hopper: whether the kernel for that architecture can be used.
    """
    if num_rows > _WHOLE_ROWS:
        small = hopper and out_features * in_features * itemsize <= _SMALL_BYTES
        return list(_of_parts(in_features, shared_memory, itemsize)) if small else []
    found: list[Tile] = []
    whole = 1 << max(in_features - 1, 1).bit_length()
    if num_rows == 1:
        # With an activation half of a program's rows are gates.
        for rows, columns, warps in product((2, 4, 8, 16), (256, 512, 1024, 2048, 4096, 8192), (1, 2, 4, 8)):
            # Numbers that a thread holds: too many spill, too few leave the memory waiting.
            held = rows * columns // (32 * warps)
            if rows > out_features or columns > whole or not 8 <= held <= 128:
                continue
            found += [Tile("row", rows, columns, warps, early=early) for early in (False, True)]
            if hopper and columns < in_features:
                found.append(Tile("row", rows, columns, warps, early=True, fetch=in_features * itemsize))
            for stages in (2, 3):
                if stages * columns * (rows + 1) * itemsize <= shared_memory:
                    found += [Tile("ring", rows, columns, warps, stages, early) for early in (False, True)]
    inputs = max(16, 1 << (num_rows - 1).bit_length())
    for rows, columns, stages, warps in product((16, 32, 64, 128), (64, 128, 256, 512), (2, 3, 4, 5), (4, 8)):
        taken = stages * columns * (rows * itemsize + inputs * 2)
        if 4096 <= rows * columns <= 32768 and columns <= whole and taken <= shared_memory:
            found += [Tile("rows", rows, columns, warps, stages, early) for early in (False, True)]
    if hopper and num_rows > 1:
        whole = max(8, 1 << (num_rows - 1).bit_length())
        if num_rows <= SPLIT_ROWS:
            found += _of_split_rows(whole, in_features, shared_memory, itemsize)
        for rows, columns, stages, tokens in product(
            (64, 128), (64, 128, 256), (4, 5, 6, 7, 8, 10, 12), (0, 16, 32) if num_rows > 16 else (0,)
        ):
            taken = stages * columns * (rows + (tokens or whole)) * itemsize
            fits = in_features % columns == 0 and stages * columns <= in_features and taken <= shared_memory
            if fits and tokens < num_rows:
                found += [Tile("hopper", rows, columns, 4, stages, early, tokens=tokens) for early in (False, True)]
    return found


def _of_split_rows(inputs: int, in_features: int, shared_memory: int, itemsize: int) -> Iterator[Tile]:
    """Tiles of Hopper's kernel with few rows of the weight, whose parts lie one below the other."""
    for split, columns, stages, early in product((2, 4), (64, 128, 256), (4, 6, 8, 10, 12, 18), (False, True)):
        steps = in_features // (split * columns)
        fits = in_features % (split * columns) == 0 and stages <= steps + _SPARE
        if fits and stages * columns * (64 + split * inputs) * itemsize <= shared_memory:
            yield Tile("hopper", 64 // split, columns, 4, stages, early, split=split)


def _of_parts(in_features: int, shared_memory: int, itemsize: int) -> Iterator[Tile]:
    """Tiles of Hopper's kernel that take some rows of the input."""
    for rows, columns, stages, warps, tokens, early in product(
        (64, 128), (64, 128), (4, 5, 6, 8, 10), (4, 8), (16, 32, 64, 128), (False, True)
    ):
        # Four warps multiply 64 rows of the weight together.
        fits = in_features % columns == 0 and stages * columns * (rows + tokens) * itemsize <= shared_memory
        if fits and rows >= 16 * warps:
            yield Tile("hopper", rows, columns, warps, stages, early, tokens=tokens)
