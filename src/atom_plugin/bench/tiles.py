"""Candidate tiles of the linear kernels, from which :mod:`atom_plugin.bench.tune` finds the fastest."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from atom_core.kernels.linear.tiles import SPLIT_ROWS, Tile

#: Bytes of shared memory per program, if torch does not report them.
SHARED_MEMORY = 64 << 10
#: Up to this many rows the input is one tile. Beyond, a program takes some rows, which pays for small weights only.
_WHOLE_ROWS, _SMALL_BYTES = 64, 64 << 20
#: A program of some input rows splits the columns of weights of up to so many bytes.
_SMALL_SPLIT_BYTES = 32 << 20
#: Stages in shared memory in addition to the steps of the loop.
_SPARE = 2


def candidates(
    num_rows: int,
    out_features: int,
    in_features: int,
    shared_memory: int = SHARED_MEMORY,
    itemsize: int = 2,
    hopper: bool = False,
) -> list[Tile]:
    """Candidate tiles of a product.

    Args:
        num_rows: of the input.
        out_features, in_features: of the weight.
        shared_memory: bytes per program.
        itemsize: bytes per element of the weight.
        hopper: whether the Hopper kernel can be used.
    """
    if num_rows > _WHOLE_ROWS:
        small = hopper and out_features * in_features * itemsize <= _SMALL_BYTES
        return list(_of_input_rows(in_features, shared_memory, itemsize)) if small else []
    found: list[Tile] = []
    whole = 1 << max(in_features - 1, 1).bit_length()
    if num_rows == 1:
        # With an activation, half of a program's rows are gates.
        for rows, columns, warps in product((2, 4, 8, 16), (256, 512, 1024, 2048, 4096, 8192), (1, 2, 4, 8)):
            # Elements per thread: too many spill registers, too few do not saturate the memory.
            per_thread = rows * columns // (32 * warps)
            if rows > out_features or columns > whole or not 8 <= per_thread <= 128:
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
    if hopper:
        whole = max(8, 1 << (num_rows - 1).bit_length())
        if num_rows <= SPLIT_ROWS:
            found += _of_split_rows(whole, 0, in_features, shared_memory, itemsize)
        elif out_features * in_features * itemsize <= _SMALL_SPLIT_BYTES:
            for tokens in (it for it in (16, 32) if it < num_rows):
                found += _of_split_rows(tokens, tokens, in_features, shared_memory, itemsize)
        for rows, columns, stages, tokens in product(
            (64, 128), (64, 128, 256), (4, 5, 6, 7, 8, 10, 12), (0, 16, 32) if num_rows > 16 else (0,)
        ):
            taken = stages * columns * (rows + (tokens or whole)) * itemsize
            fits = in_features % columns == 0 and stages * columns <= in_features and taken <= shared_memory
            if fits and tokens < num_rows:
                found += [Tile("hopper", rows, columns, 4, stages, early, tokens=tokens) for early in (False, True)]
    return found


def _of_split_rows(inputs: int, tokens: int, in_features: int, shared_memory: int, itemsize: int) -> Iterator[Tile]:
    """Tiles of the Hopper kernel with few rows of the weight, which splits their columns and stacks the splits.

    ``inputs``: the input's rows that a program has; ``tokens``: the same, or 0 if they are all of it.
    """
    for split, columns, stages, early in product((2, 4), (64, 128, 256), (4, 6, 8, 10, 12, 18), (False, True)):
        steps = in_features // (split * columns)
        fits = in_features % (split * columns) == 0 and stages <= steps + _SPARE
        if fits and stages * columns * (64 + split * inputs) * itemsize <= shared_memory:
            yield Tile("hopper", 64 // split, columns, 4, stages, early, tokens=tokens, split=split)


def _of_input_rows(in_features: int, shared_memory: int, itemsize: int) -> Iterator[Tile]:
    """Tiles of the Hopper kernel with some of the input's rows."""
    for rows, columns, stages, warps, tokens, early in product(
        (64, 128), (64, 128), (4, 5, 6, 8, 10), (4, 8), (16, 32, 64, 128), (False, True)
    ):
        # Four warps multiply 64 rows of the weight together.
        fits = in_features % columns == 0 and stages * columns * (rows + tokens) * itemsize <= shared_memory
        if fits and rows >= 16 * warps:
            yield Tile("hopper", rows, columns, warps, stages, early, tokens=tokens)
