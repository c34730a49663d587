"""Candidates for a tile, which one is kept, and that the loader reads what is written."""

from __future__ import annotations

from dataclasses import asdict
from types import SimpleNamespace

import pytest
import torch

from atom_core.kernels import tuned
from atom_core.kernels.linear.tiles import Tile, chosen_tile
from atom_core.models.read_config import read_model_config
from atom_plugin.bench import tune
from atom_plugin.bench.cases import routers
from atom_plugin.bench.models import read_config
from atom_plugin.bench.tiles import candidates
from atom_plugin.bench.tune import ROWS, choose, line, write

SHARED_MEMORY = 227 << 10
SHAPES = [(4096, 1024), (1024, 3072), (24576, 4096), (151936, 4096), (100, 60)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("rows", [rows for rows in ROWS if rows <= 64])
def test_candidates_are_many_different_and_fit(rows, shape):
    found = candidates(rows, *shape, SHARED_MEMORY)
    assert len(found) == len(set(found)) > 5
    for tile in found:
        assert tile.kernel.endswith("rows") or rows == 1
        if tile.kernel == "rows":
            assert tile.stages * tile.columns * 2 * (tile.rows + max(16, rows)) <= SHARED_MEMORY


def test_many_rows_may_be_taken_in_parts():
    found = candidates(64, 4096, 4096, SHARED_MEMORY, hopper=True)
    assert {tile.tokens for tile in found if tile.kernel == "hopper"} == {0, 16, 32}
    assert {tile.tokens for tile in candidates(16, 4096, 4096, SHARED_MEMORY, hopper=True)} == {0}


@pytest.mark.parametrize(("rows", "splits"), [(1, {1, 2, 4}), (2, {1, 2, 4}), (16, {1, 2, 4})])
def test_few_rows_may_be_split_on_hopper(rows, splits):
    found = candidates(rows, 2048, 2048, 227 << 10, hopper=True)
    assert len(found) == len(set(found))
    assert {tile.split for tile in found} == splits
    taken = max(8, 1 << (rows - 1).bit_length())
    for tile in found:
        if tile.split > 1:
            assert tile.rows * tile.split == 64
            assert tile.stages * tile.columns * 2 * (64 + tile.split * taken) <= 227 << 10
            assert (tile.stages - 2) * tile.columns * tile.split <= 2048
    assert {tile.split for tile in candidates(rows, 2048, 2048, 227 << 10)} == {1}


def test_more_rows_are_split_in_parts_where_the_weight_is_small():
    found = [tile for tile in candidates(64, 2048, 4096, 227 << 10, hopper=True) if tile.split > 1]
    assert {tile.tokens for tile in found} == {16, 32}
    assert all(tile.stages * tile.columns * 2 * (64 + tile.split * tile.tokens) <= 227 << 10 for tile in found)
    assert {tile.split for tile in candidates(64, 12288, 4096, 227 << 10, hopper=True)} == {1}


@pytest.mark.parametrize("rows", [128, 256])
def test_more_rows_are_taken_in_parts_of_small_weights_on_hopper(rows):
    found = candidates(rows, 4096, 1024, SHARED_MEMORY, hopper=True)
    assert len(found) == len(set(found)) > 50
    assert {tile.kernel for tile in found} == {"hopper"}
    assert {tile.tokens for tile in found} == {16, 32, 64, 128}
    assert {(tile.rows, tile.warps) for tile in found} == {(64, 4), (128, 4), (128, 8)}
    assert all(tile.stages * tile.columns * 2 * (tile.rows + tile.tokens) <= SHARED_MEMORY for tile in found)
    assert candidates(rows, 4096, 1024, SHARED_MEMORY) == []
    assert candidates(rows, 24576, 4096, SHARED_MEMORY, hopper=True) == []


def test_one_row_may_have_the_rest_of_the_weight_fetched_on_hopper():
    found = candidates(1, 4096, 1024, SHARED_MEMORY, hopper=True)
    assert {tile.fetch for tile in found} == {0, 2048}
    assert all(tile.columns < 1024 and tile.early for tile in found if tile.fetch)
    assert {tile.fetch for tile in candidates(1, 4096, 1024, SHARED_MEMORY)} == {0}


@pytest.mark.parametrize(("model", "sizes"), [("deepseek-v2-lite", [(64, 2048)]), ("qwen3-0.6b", [])])
def test_routers_are_tuned_too(model, sizes):
    config = read_model_config(read_config(model))
    assert [(it.out_features, it.in_features) for it in routers(config)] == sizes


def test_less_shared_memory_leaves_fewer():
    assert set(candidates(8, 4096, 4096, 64 << 10)) < set(candidates(8, 4096, 4096, SHARED_MEMORY))


def test_candidates_are_tiles_of_the_kernel():
    pytest.importorskip("triton")
    from atom_core.kernels.linear.triton_kernel import _KERNELS

    for rows in (1, 8):
        assert all(tile.kernel in _KERNELS for tile in candidates(rows, 4096, 1024))


def test_only_what_is_clearly_faster_replaces_the_default():
    default, other = Tile("row", 4, 1024, 4), Tile("row", 8, 1024, 4)
    assert choose(default, {default: 1.0, other: 0.999}) == default
    assert choose(default, {default: 1.0, other: 0.99}) == other
    assert choose(None, {None: 1.0, other: 0.999}) is None


def test_what_is_written_is_read(tmp_path):
    def entry(rows, out_features):
        return {
            "rows": rows,
            "out_features": out_features,
            "in_features": 1024,
            "dtype": "bfloat16",
            "tile": asdict(Tile("row", 4, 1024, 4)),
            "microseconds": 3.5,
            "default_microseconds": 4.0,
        }

    path = tuned.tuned_file(tmp_path, "NVIDIA H200")
    entries = [entry(2, 4096), entry(1, 4096), entry(1, 1024)]
    write(path, "NVIDIA H200", entries)
    assert [(it["out_features"], it["rows"]) for it in tuned.read_entries(path)] == [(1024, 1), (4096, 1), (4096, 2)]
    tile = tuned.lookup(tmp_path, "NVIDIA H200", 2, 4096, 1024, "bfloat16")
    assert Tile(**tile) == Tile("row", 4, 1024, 4)
    assert line(entries[0]).startswith("  2 rows, 4096 x 1024: a step takes 3.5 us with kernel row, rows 4")


def test_candidates_take_turns_within_the_step_and_one_that_cannot_be_captured_takes_none(monkeypatch):
    pytest.importorskip("triton")
    from triton.runtime.errors import OutOfResources

    kept, tried = Tile("row", 2, 128, 4), Tile("row", 4, 128, 4)
    large = Tile("row", 8, 128, 4)
    x, weight, other = torch.randn(1, 96).half(), torch.randn(52, 96).half(), torch.randn(48, 96).half()
    captured, turns = [], []

    def run():
        tiles = [chosen_tile(x, it, nvidia=True) for it in (weight, other)]
        if tiles[0] == large:
            raise OutOfResources(300, 227, "shared memory")
        return tiles

    def capture(run):
        captured.append(run())
        rows = captured[-1][0].rows if captured[-1][0] else 1
        return SimpleNamespace(replay=lambda: rows)

    def measure(replay, *_, **__):
        turns.append(replay())
        return SimpleNamespace(median=float(turns[-1]))

    monkeypatch.setattr(tune, "capture", capture)
    monkeypatch.setattr(tune, "measure", measure)
    shape, behind = (tuned.Shape(1, size, 96, "float16") for size in (52, 48))
    seconds = tune._in_step(run, shape, [None, tried, large], {behind: kept})
    assert seconds == {None: 1.0, tried: 4.0}
    assert turns == [1, 4] * 5
    assert captured[0][0] is None, "torch's product"
    assert [tiles[1] for tiles in captured] == [kept] * 2
    assert captured[1][0] == tried
