"""Tuned tiles: found by device and shape, absent without complaint, damaged with one."""

from __future__ import annotations

import json

import pytest

from atom_core.kernels import tuned
from atom_core.kernels.tuned import Shape, load, lookup, tuned_file

TILE = {"kernel": "row", "rows": 4, "columns": 1024, "warps": 4, "stages": 1}


def entry(**changes):
    return {
        "rows": 1,
        "out_features": 4096,
        "in_features": 1024,
        "dtype": "bfloat16",
        "tile": TILE,
        "microseconds": 3.5,
        "default_microseconds": 4,
        **changes,
    }


def write(folder, *entries, device="NVIDIA H200"):
    path = tuned_file(folder, device)
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({"device": device, "entries": list(entries)}))
    return path


@pytest.fixture(autouse=True)
def _nothing_remembered():
    for function in (load, tuned._find):
        function.cache_clear()


@pytest.mark.parametrize(
    ("device", "name"),
    [
        ("NVIDIA H200", "NVIDIA_H200.json"),
        ("NVIDIA A100-SXM4-80GB", "NVIDIA_A100_SXM4_80GB.json"),
        ("AMD Instinct MI300X", "AMD_Instinct_MI300X.json"),
        ("../a device (of sorts)", "a_device_of_sorts.json"),
    ],
)
def test_a_device_has_one_file(tmp_path, device, name):
    assert tuned_file(tmp_path, device) == tmp_path / "tuned" / name


def test_a_shape_is_found(tmp_path):
    write(tmp_path, entry())
    assert load(tmp_path, "NVIDIA H200") == {Shape(1, 4096, 1024, "bfloat16"): TILE}
    assert lookup(tmp_path, "NVIDIA H200", 1, 4096, 1024, "bfloat16") == TILE


@pytest.mark.parametrize(
    ("device", "shape"),
    [
        ("NVIDIA H100", (1, 4096, 1024, "bfloat16")),
        ("NVIDIA H200", (2, 4096, 1024, "bfloat16")),
        ("NVIDIA H200", (1, 4097, 1024, "bfloat16")),
        ("NVIDIA H200", (1, 4096, 1025, "bfloat16")),
        ("NVIDIA H200", (1, 4096, 1024, "float16")),
    ],
)
def test_what_was_not_measured_has_no_tile(tmp_path, device, shape):
    write(tmp_path, entry())
    assert lookup(tmp_path, device, *shape) is None


def test_rows_take_the_next_larger_measured_ones_up_to_twice_as_many(tmp_path):
    tiles = {rows: {**TILE, "rows": 16 * rows} for rows in (1, 4, 16)}
    write(tmp_path, *(entry(rows=rows, tile=tile) for rows, tile in tiles.items()))
    found = {rows: lookup(tmp_path, "NVIDIA H200", rows, 4096, 1024, "bfloat16") for rows in (1, 2, 3, 4, 8, 9, 16, 17)}
    assert found == {
        1: tiles[1],
        2: None,
        3: tiles[4],
        4: tiles[4],
        8: None,
        9: tiles[16],
        16: tiles[16],
        17: None,
    }


def test_a_file_is_read_once(tmp_path):
    path = write(tmp_path, entry())
    assert load(tmp_path, "NVIDIA H200")
    path.unlink()
    assert load(tmp_path, "NVIDIA H200")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not valid JSON"),
        ("[]", "has no list of 'entries'"),
        ('{"entries": {}}', "has no list of 'entries'"),
        (json.dumps({"entries": [1]}), "entry 0 is a int, not an object"),
        (json.dumps({"entries": [{"rows": 1}]}), r"entry 0 has the keys \['rows'\]"),
        (json.dumps({"entries": [entry(rows=0)]}), "entry 0 has rows=0; a positive integer"),
        (json.dumps({"entries": [entry(in_features=True)]}), "entry 0 has in_features=True"),
        (json.dumps({"entries": [entry(dtype=16)]}), "entry 0 has dtype=16"),
        (json.dumps({"entries": [entry(tile={})]}), "entry 0 has tile={}"),
        (json.dumps({"entries": [entry(tile={**TILE, "warps": 1.5})]}), "entry 0 has a tile with warps=1.5"),
        (json.dumps({"entries": [entry(microseconds="3")]}), "entry 0 has microseconds='3', which is no number"),
        (json.dumps({"entries": [entry(microseconds=0)]}), "entry 0 has microseconds=0; a finite number above 0"),
        (json.dumps({"entries": [entry(rows=2), entry(), entry()]}), "entry 2 repeats Shape"),
    ],
)
def test_a_damaged_file_is_named(tmp_path, content, message):
    path = write(tmp_path)
    path.write_text(content)
    with pytest.raises(ValueError, match=message) as caught:
        lookup(tmp_path, "NVIDIA H200", 1, 4096, 1024, "bfloat16")
    assert str(path) in str(caught.value)
