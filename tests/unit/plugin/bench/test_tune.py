"""Candidates for a tile, which one is kept, and that the loader reads what is written."""

from __future__ import annotations

from dataclasses import asdict

import pytest

from atom_core.kernels import tuned
from atom_plugin.bench.tune import Candidate, candidates, choose, line, write

SHARED_MEMORY = 227 << 10
SHAPES = [(4096, 1024), (1024, 3072), (24576, 4096), (151936, 4096), (100, 60)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("rows", [1, 2, 4, 8, 16])
def test_candidates_are_many_different_and_fit(rows, shape):
    found = candidates(rows, *shape, SHARED_MEMORY)
    assert len(found) == len(set(found)) > 5
    for tile in found:
        assert tile.kernel.endswith("rows") or rows == 1
        if tile.kernel == "rows":
            assert tile.stages * tile.columns * (2 * tile.rows + 32) <= SHARED_MEMORY


def test_less_shared_memory_leaves_fewer():
    assert set(candidates(8, 4096, 4096, 64 << 10)) < set(candidates(8, 4096, 4096, SHARED_MEMORY))


def test_candidates_are_tiles_of_the_kernel():
    pytest.importorskip("triton")
    from atom_core.kernels.linear.tiles import Tile
    from atom_core.kernels.linear.triton_kernel import _KERNELS

    for rows in (1, 8):
        assert all(Tile(**asdict(tile)).kernel in _KERNELS for tile in candidates(rows, 4096, 1024))


def test_only_what_is_clearly_faster_replaces_the_default():
    default, other = Candidate("row", 4, 1024, 4), Candidate("row", 8, 1024, 4)
    assert choose(default, {default: 1.0, other: 0.99}) == default
    assert choose(default, {default: 1.0, other: 0.9}) == other


def test_what_is_written_is_read(tmp_path):
    def entry(rows, out_features):
        return {
            "rows": rows,
            "out_features": out_features,
            "in_features": 1024,
            "dtype": "bfloat16",
            "tile": asdict(Candidate("row", 4, 1024, 4)),
            "microseconds": 3.5,
            "default_microseconds": 4.0,
            "gigabytes_per_second": 2400.0,
        }

    path = tuned.tuned_file(tmp_path, "NVIDIA H200")
    entries = [entry(2, 4096), entry(1, 4096), entry(1, 1024)]
    write(path, "NVIDIA H200", entries)
    assert [(it["out_features"], it["rows"]) for it in tuned.read_entries(path)] == [(1024, 1), (4096, 1), (4096, 2)]
    tile = tuned.lookup(tmp_path, "NVIDIA H200", 2, 4096, 1024, "bfloat16")
    assert Candidate(**tile) == Candidate("row", 4, 1024, 4)
    assert line(entries[0]).startswith("  2 rows, 4096 x 1024: 3.50 us (2400 GB/s) with kernel row, rows 4")
