"""`bench step` and `bench kernels --grid` end to end: long requests that differ, and cells beside what is here."""

from __future__ import annotations

import json

import pytest

from atom_plugin.bench import grid_run
from atom_plugin.bench.grid import GRID_OPS, Axes, GridOptions
from atom_plugin.bench.step import StepOptions, measure_step


@pytest.mark.parametrize("model", ["qwen3-0.6b", "gpt-oss-20b", "deepseek-v2-lite", "qwen3.5-27b"])
@pytest.mark.parametrize("cache_dtype", ["auto", "fp8_e4m3"])
def test_a_step_of_requests_that_differ(model, cache_dtype):
    layers = 4 if model == "qwen3.5-27b" else 2
    options = StepOptions(
        model, context=(512, 131_072), cache_dtype=cache_dtype, layers=layers, repetitions=1, max_model_len=140_000
    )
    found = measure_step(options).as_json()
    assert (found["batch"], found["context"], found["max_model_len"]) == (2, [512, 131_072], 140_000)
    assert 0 < found["share_of_floor"] < 1.1


@pytest.mark.parametrize("model", ["qwen3-0.6b", "gpt-oss-20b", "deepseek-v2-lite", "qwen3.5-35b-a3b"])
@pytest.mark.parametrize("batch", [0, 9])
def test_a_step_with_chunks_of_prompts(model, batch):
    layers = 4 if model == "qwen3.5-35b-a3b" else 2
    options = StepOptions(
        model,
        batch,
        (700,),
        chunk=(2000, 48),
        chunk_context=1500,
        page_size=1,
        layers=layers,
        repetitions=1,
        profile=True,
    )
    found = measure_step(options).as_json()
    assert (found["batch"], found["chunk"]) == (batch, (2000, 48))
    assert 0 < found["share_of_floor"] < 1.1
    assert sum(it["seconds"] for it in found["profile"]) > 0


@pytest.mark.parametrize("cache_dtype", ["auto", "fp8_e4m3"])
@pytest.mark.parametrize("op", GRID_OPS)
def test_cells_of_a_grid_agree_and_have_times(tmp_path, op, cache_dtype):
    axes = Axes(
        requests=(1, 9),
        tokens=(513, 32_768),
        group=(5, 16),
        head_dim=(64, 256),
        kv_heads=(2,),
        heads=(16,),
        cache_dtype=(cache_dtype,),
    )
    lines = []
    grid_run.execute(GridOptions((op,), axes, repetitions=1), tmp_path / "grid.json", lines.append)
    found = json.loads((tmp_path / "grid.json").read_text())
    assert found["wrong"] == found["left_out"] == []
    for cell in found["cells"]:
        for contender in cell["contenders"]:
            assert (contender["microseconds"] is None) == bool(contender["note"]), "\n".join(lines)
