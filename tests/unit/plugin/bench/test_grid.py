"""`bench kernels --grid` without a GPU: its cells, their memory, the libraries beside ours, the report, the errors.

A CPU's kernels run the cells; a stand-in for vLLM's libraries computes what their arguments mean.
"""

from __future__ import annotations

import json
import math
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from atom_core.kernels import kernel_set
from atom_core.kernels.select import Target
from atom_plugin.bench import device, grid_run, kernels
from atom_plugin.bench.agreement import distance
from atom_plugin.bench.cases import Bench
from atom_plugin.bench.device import Ceiling, Limits, Timing, measure_in_turns
from atom_plugin.bench.grid import ALL_SHAPES, GRID_OPS, Axes, Cell, GridOptions, axes_of
from atom_plugin.bench.grid_contenders import exact, libraries, make_inputs, ours
from atom_plugin.bench.grid_results import CellResult, Mean, means
from tests.unit.plugin.installed import assert_both_refuse

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
CPU = torch.device("cpu")
LIMITS = Limits(Ceiling("a GPU", copy=4e12, read=3e12), products=8e14)
TINY = Axes(
    requests=(1, 3), tokens=(16, 40), group=(5,), head_dim=(32,), kv_heads=(2,), heads=(3,), cache_dtype=("auto",)
)
OPTIONS = GridOptions(ops=GRID_OPS, axes=TINY, max_model_len=64)


def kv_cell(**changes):
    values = {
        "op": "attention",
        "requests": 8,
        "tokens": 2048,
        "num_heads": 32,
        "num_kv_heads": 8,
        "head_dim": 128,
        "page_size": 16,
        "dtype": BF16,
        "cache_dtype": BF16,
        **changes,
    }
    return Cell(**values)


LATENTS = kv_cell(op="mla_attention", num_heads=16, num_kv_heads=1, head_dim=512, page_size=64, rope_dim=64)


def test_the_default_grid_is_requests_by_tokens_of_one_shape():
    cells = list(GridOptions().cells())
    assert len(cells) == len(set(cells)) == 25 + 2 * 25
    first, last = cells[0], cells[-1]
    assert first.name == "1 x 512, 32 + 8 heads of 128, pages of 16, bfloat16 cache"
    assert last.name == "128 x 131072, 128 heads, pages of 64, bfloat16 cache"
    assert {cell.op for cell in cells} == {"decode_attention", "mla_attention"}


def test_all_shapes_are_those_of_every_axis():
    found = list(GridOptions(ops=("attention",), axes=axes_of({}, True)).cells())
    assert len(found) == len(set(found)) == 25 * 5 * 3 * 2 * 2
    assert {cell.num_heads // cell.num_kv_heads for cell in found} == {4, 5, 7, 8, 16}
    assert {cell.head_dim for cell in found} == {64, 128, 256}
    assert {cell.page_size for cell in found} == {16, 64}
    assert {cell.cache_dtype for cell in found} == {BF16, E4M3}


def test_an_axis_is_chosen_by_its_option():
    assert axes_of({"requests": (3,), "page_size": ()}, False) == Axes(requests=(3,))
    assert axes_of({"group": (4,)}, True).group == (4,)
    assert axes_of({"group": (4,)}, True).head_dim == ALL_SHAPES.head_dim


def test_a_cell_counts_what_is_read_once():
    cell = kv_cell()
    assert cell.num_bytes == 8 * 2 * (2048 * 8 * 256 + 2 * 32 * 128)
    assert kv_cell(op="decode_attention").num_bytes == cell.num_bytes + 8 * 2 * 8 * 128 * 2
    assert kv_cell(cache_dtype=E4M3).num_bytes == 8 * (2048 * 8 * 256 + 2 * 2 * 32 * 128)
    assert cell.num_operations == 4 * 8 * 2048 * 32 * 128
    assert LATENTS.num_bytes == 8 * 2 * (2048 * 576 + 16 * (576 + 512))
    assert LATENTS.num_operations == 2 * 8 * 2048 * 16 * (576 + 512)


def test_memory_is_that_of_whole_pages_and_more():
    assert kv_cell(tokens=2049).pool_bytes == 8 * 129 * 16 * 8 * 256 * 2
    assert math.prod(kv_cell().pool_shape) * 2 == kv_cell().pool_bytes == 8 * 2048 * 8 * 256 * 2
    assert math.prod(LATENTS.pool_shape) * 2 == LATENTS.pool_bytes == 8 * 2048 * 576 * 2
    assert kv_cell(requests=128, tokens=131_072, head_dim=256).needed_bytes > 137e9
    assert kv_cell(requests=128, tokens=131_072).needed_bytes < 0.95 * 139e9


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ops": ("linear",)}, "--op 'linear': a --grid has decode_attention, attention, mla_attention"),
        ({"repetitions": 0}, "--repetitions 0"),
        ({"dtype": "int8"}, "--dtype 'int8'"),
        ({"axes": Axes(requests=(0,))}, "--requests 0: a positive number"),
        ({"axes": Axes(kv_heads=(-1,))}, "--kv-heads -1: a positive number"),
        ({"axes": Axes(tokens=(8192,)), "max_model_len": 4096}, "--tokens 8192: more than --max-model-len 4096"),
        ({"axes": Axes(page_size=(24,))}, "--page-size 24: a multiple of 16"),
        ({"axes": Axes(head_dim=(320,))}, "--head-dim 320: a multiple of 16 up to 256"),
        ({"axes": Axes(cache_dtype=("int8",))}, "--cache-dtype 'int8'"),
        ({"axes": Axes(cache_dtype=("float16",))}, "--cache-dtype 'float16': a cache has the --dtype bfloat16"),
    ],
)
def test_what_a_grid_has_not_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        GridOptions(**options).check()


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--grid",), "No GPU that torch"),
        (("--grid", "--op", "attention", "--requests", "8", "--tokens", "512", "--group", "5"), "No GPU that torch"),
        (("--grid", "--op", "linear"), "--op 'linear': a --grid has"),
        (("--grid", "--page-size", "20"), "--page-size 20"),
        (("--grid", "--op", "decode_attention", "--heads", "16"), "--heads is an axis that decode_attention does not"),
        (("--grid", "--op", "mla_attention", "--group", "4"), "--group is an axis that mla_attention does not have"),
        (("--grid", "--heads", "16", "--group", "4"), "No GPU that torch"),
        (("--grid", "--model", "qwen3-8b"), "--grid has shapes of its own"),
        (("--grid", "--tune"), "--grid has shapes of its own"),
        (("--requests", "8"), "--requests is for --grid"),
        (("--all-shapes",), "--all-shapes is for --grid"),
        (("--max-model-len", "8"), "--max-model-len is for --grid"),
    ],
)
def test_both_command_lines_say_what_is_wrong(arguments, message, capsys):
    assert_both_refuse("kernels", kernels.main, arguments, message, capsys)


def bench_of(dtype):
    return Bench(CPU, dtype, kernel_set(Target.of(CPU)))


@pytest.mark.parametrize("op", GRID_OPS)
@pytest.mark.parametrize("cache_dtype", [BF16, E4M3], ids=str)
@pytest.mark.parametrize(("group", "page_size", "tokens"), [(4, 16, 48), (5, 16, 33), (7, 64, 100), (16, 32, 1)])
def test_our_kernels_compute_what_a_cell_means(op, cache_dtype, group, page_size, tokens):
    shape = {"requests": 3, "tokens": tokens, "page_size": page_size, "cache_dtype": cache_dtype}
    cell = kv_cell(op=op, num_heads=2 * group, num_kv_heads=2, head_dim=64, **shape)
    if op == "mla_attention":
        cell = kv_cell(op=op, num_heads=group, num_kv_heads=1, head_dim=512, rope_dim=64, **shape)
    with torch.inference_mode():
        inputs = make_inputs(cell, bench_of(BF16), 2, 128)
        before = inputs.pools[1].view(torch.uint8).clone()
        run = ours(inputs)
        found = [run(index).float().clone() for index in (0, 1)]
        expected = torch.stack([exact(inputs, request) for request in range(3)])
    assert torch.equal(*found)
    assert found[0].shape == expected.shape
    assert distance(found[0], expected) < 0.01
    assert torch.equal(inputs.pools[1].view(torch.uint8), before), "what was cached stays"


def attended(q, k, v, given, scale, round_to=None):
    """Paged attention in float32 of one query a request; weights are rounded as a kernel in FP8 would."""
    found = []
    for request, length in enumerate(given["seqused_k"].tolist()):
        pages = given["block_table"][request, : -(-length // k.shape[1])].long()
        keys, values = (side.float()[pages].flatten(0, 1)[:length] for side in (k, v))
        queries = q[request].float().unflatten(0, (k.shape[2], -1))
        weights = (torch.einsum("kgd,tkd->kgt", queries, keys) * scale).softmax(-1)
        largest = weights.amax(-1, keepdim=True)
        weights = weights if round_to is None else (weights / largest).to(round_to).float() * largest
        found.append(torch.einsum("kgt,tkd->kgd", weights, values).flatten(0, 1))
    return torch.stack(found)


class Libraries:
    """vLLM's modules as far as a grid calls them."""

    def __init__(self, monkeypatch, factor=1.0):
        self.calls, self.schedules, self.factor = [], [], factor
        interface = ModuleType("vllm.vllm_flash_attn.flash_attn_interface")
        interface.is_fa_version_supported = lambda version: version == 3
        interface.get_scheduler_metadata = lambda **given: self.schedules.append(given) or given
        interface.flash_attn_varlen_func = self.flash_attn_varlen_func
        flashmla = ModuleType("vllm.v1.attention.ops.flashmla")
        flashmla.is_flashmla_dense_supported = lambda: (True, None)
        flashmla.get_mla_metadata = lambda *given, **named: (object(), None)
        flashmla.get_mla_metadata_dense_fp8 = lambda *given: (object(), object())
        flashmla.flash_mla_with_kvcache = self.flash_mla
        flashmla.flash_mla_with_kvcache_fp8 = self.flash_mla
        for module, attribute in ((interface, "flash_attn_interface"), (flashmla, "flashmla")):
            package, _, _ = module.__name__.rpartition(".")
            parents = [package[: at or None] for at in (*(i for i, c in enumerate(package) if c == "."), 0)]
            for name in parents:
                monkeypatch.setitem(sys.modules, name, sys.modules.get(name) or ModuleType(name))
            setattr(sys.modules[package], attribute, module)
            monkeypatch.setitem(sys.modules, module.__name__, module)

    def flash_attn_varlen_func(self, **given):
        assert given["fa_version"] == 3
        assert given["q"].dtype == given["k"].dtype == given["v"].dtype
        self.calls.append(given)
        latent = "q_v" in given
        q = torch.cat([given["q_v"], given["q"]], -1) if latent else given["q"]
        k = torch.cat([given["v"], given["k"]], -1) if latent else given["k"]
        fp8 = E4M3 if q.dtype == E4M3 else None
        if fp8:
            assert {given[f"{side}_descale"].shape for side in "qkv"} == {(len(q), k.shape[2])}
        out = attended(q, k, given["v"], given, given["softmax_scale"], fp8) * self.factor
        if latent:
            return out.to(q.dtype)
        given["out"].copy_(out)
        return given["out"]

    def flash_mla(self, **given):
        given["seqused_k"] = given["cache_seqlens"]
        rows = given["k_cache"]
        assert rows.shape[1] == 64
        assert given["q"].dtype == rows.dtype
        values = rows[..., : given["head_dim_v"]]
        fp8 = E4M3 if rows.dtype == E4M3 else None
        found = attended(given["q"].squeeze(1), rows, values, given, given["softmax_scale"], fp8)
        return (found * self.factor).unsqueeze(1), None


@pytest.fixture
def without_gpu(monkeypatch):
    """What a grid asks of CUDA, answered by a CPU; a library takes one and a half times as long as ours."""
    captured = []

    def capture(run):
        run()
        captured.append(run)
        return SimpleNamespace(replay=run)

    def in_turns(replays, rounds):
        assert len({len(graphs) for graphs in replays.values()}) <= 1
        seconds = {"atom": 1e-4}
        return {name: [seconds.get(name, 1.5e-4)] * rounds * len(graphs) for name, graphs in replays.items()}

    monkeypatch.setattr(grid_run, "require_gpu", lambda: CPU)
    monkeypatch.setattr(grid_run, "measure_ceiling", lambda device: LIMITS.memory)
    monkeypatch.setattr(grid_run, "measure_products", lambda device, dtype: LIMITS.products)
    monkeypatch.setattr(grid_run, "cache_and_memory", lambda device: (1 << 10, 20 << 20))
    monkeypatch.setattr(grid_run, "capture", capture)
    monkeypatch.setattr(grid_run, "measure_in_turns", in_turns)
    return captured


def measured(options, tmp_path):
    lines = []
    path = tmp_path / "grid.json"
    grid_run.execute(options, path, lines.append)
    return lines, json.loads(path.read_text())


def test_without_vllm_each_cell_says_that_its_libraries_are_absent(without_gpu, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "vllm", None)
    lines, found = measured(OPTIONS, tmp_path)
    cells = [line for line in lines if " x " in line and "us" in line]
    assert len(cells) == len(found["cells"]) == 3 * 4
    assert all("FlashAttention 3 absent" in line for line in cells)
    assert all(("FlashMLA absent" in line) == line.startswith("mla_attention") for line in cells)
    (reason,) = (line for line in lines if line.startswith("FlashAttention 3: "))
    assert reason.startswith("FlashAttention 3: vLLM's FlashAttention cannot be imported: ")
    assert "attention, bfloat16 cache, beside FlashAttention 3: no ratio, in none of 4 cells" in lines
    mine, theirs = found["cells"][0]["contenders"]
    assert (mine["contender"], theirs["contender"]) == ("atom", "FlashAttention 3")
    assert theirs["microseconds"] is theirs["ratio"] is None
    assert "cannot be imported" in theirs["note"]
    assert found["geometric_means"][0]["geometric_mean"] is None
    assert found["left_out"] == found["wrong"] == []


@pytest.mark.parametrize("cache_dtype", ["auto", "fp8_e4m3"])
def test_libraries_are_timed_beside_ours(without_gpu, monkeypatch, tmp_path, cache_dtype):
    fake = Libraries(monkeypatch)
    axes = axes_of({**vars(TINY), "cache_dtype": (cache_dtype,)}, False)
    lines, found = measured(GridOptions(ops=GRID_OPS, axes=axes, max_model_len=64), tmp_path)
    assert found["wrong"] == []
    cell = found["cells"][0]
    assert cell["cache_dtype"] == ("bfloat16" if cache_dtype == "auto" else "float8_e4m3fn")
    mine, theirs = cell["contenders"]
    assert mine["microseconds"] == pytest.approx(100 / 16)  # a graph has so many calls
    assert theirs["ratio"] == pytest.approx(1.5)
    assert mine["bytes_a_second"] == pytest.approx(cell["num_bytes"] / 6.25e-6)
    assert mine["share_of_floor"] == pytest.approx(cell["floor_microseconds"] / 6.25)
    printed = next(line for line in lines if line.startswith(cell["op"]))
    assert printed.endswith("1.50x")
    assert "GB/s" in printed
    by_op = {(it["op"], it["library"]): it for it in found["geometric_means"]}
    assert by_op["decode_attention", "FlashAttention 3"]["geometric_mean"] == pytest.approx(1.5)
    assert by_op["mla_attention", "FlashMLA"]["cells_with_ratio"] == 4
    # FlashAttention 3 has no FP8 cache of latents in vLLM.
    with_latents = by_op["mla_attention", "FlashAttention 3"]["cells_with_ratio"]
    assert with_latents == (4 if cache_dtype == "auto" else 0)
    # A graph's replays are scheduled for the longest request, and captured for the longest sequence.
    assert {(it["max_seqlen_k"], it["num_splits"]) for it in fake.schedules} == {(16, 32), (40, 32)}
    assert {it["max_seqlen_k"] for it in fake.calls} == {64}
    assert {id(it["scheduler_metadata"]) for it in fake.calls} == {id(it) for it in fake.schedules}


def test_flash_mla_reads_no_other_pages(without_gpu, monkeypatch, tmp_path):
    Libraries(monkeypatch)
    axes = axes_of({**vars(TINY), "page_size": (32,)}, False)
    lines, found = measured(GridOptions(ops=("mla_attention",), axes=axes, max_model_len=64), tmp_path)
    assert "FlashMLA: FlashMLA reads pages of 64 tokens, not of 32" in lines
    notes = [[it["note"] for it in cell["contenders"]] for cell in found["cells"]]
    assert notes == [["", "", "FlashMLA reads pages of 64 tokens, not of 32"]] * 4


def test_values_that_disagree_have_no_time_and_end_the_command(without_gpu, monkeypatch, tmp_path, capsys):
    Libraries(monkeypatch, factor=1.2)
    path = tmp_path / "grid.json"
    small = ["--requests", "3", "--tokens", "40", "--kv-heads", "2", "--head-dim", "32"]
    assert kernels.main(["--grid", "--op", "attention", *small, "--json", str(path)]) == 1
    said = capsys.readouterr()
    name = "3 x 40, 8 + 2 heads of 32, pages of 16, bfloat16 cache"
    assert said.err.startswith(
        f"Values disagree, and no time is given, in 1 cells: attention {name}: FlashAttention 3 its"
    )
    assert "FlashAttention 3 wrong" in said.out
    (cell,) = json.loads(path.read_text())["cells"]
    mine, theirs = cell["contenders"]
    assert mine["microseconds"] is not None
    assert theirs["microseconds"] is None
    assert theirs["wrong"]
    assert theirs["note"].startswith("its values are 2.0e-01 from atom's")


def test_ours_is_compared_with_float32(without_gpu, monkeypatch, tmp_path):
    Libraries(monkeypatch)
    monkeypatch.setattr(grid_run, "ours", lambda inputs: lambda index: 1.5 * ours(inputs)(index))
    with pytest.raises(
        ValueError, match=r"in 4 cells: attention 1 x 16, .*: atom its values are 5\.0e-01 from float32's"
    ):
        measured(GridOptions(ops=("attention",), axes=TINY, max_model_len=64), tmp_path)
    (first, *_) = json.loads((tmp_path / "grid.json").read_text())["cells"]
    assert [it["ratio"] for it in first["contenders"]] == [None, None]
    assert [it["wrong"] for it in first["contenders"]] == [True, False]


def test_a_library_that_fails_says_so_and_ours_is_timed(without_gpu, monkeypatch, tmp_path):
    fake = Libraries(monkeypatch)

    def failing(**given):
        raise RuntimeError("This head size is not supported.\nand a stack")

    sys.modules["vllm.vllm_flash_attn.flash_attn_interface"].flash_attn_varlen_func = failing
    lines, found = measured(GridOptions(ops=("attention",), axes=TINY, max_model_len=64), tmp_path)
    assert "FlashAttention 3: it fails: This head size is not supported." in lines
    assert found["cells"][0]["contenders"][0]["microseconds"] is not None
    assert fake.calls == []


def test_cells_that_do_not_fit_are_left_out_by_name(without_gpu, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "vllm", None)
    axes = axes_of({**vars(TINY), "tokens": (16, 100_000)}, False)
    lines, found = measured(GridOptions(ops=("attention",), axes=axes), tmp_path)
    left = "3 x 100000, 10 + 2 heads of 32, pages of 16, bfloat16 cache"
    needed = kv_cell(requests=3, tokens=100_000, num_heads=10, num_kv_heads=2, head_dim=32).needed_bytes
    (line,) = (line for line in lines if left in line)
    assert line.endswith(f"left out: it needs {needed / 1e9:.1f} GB of GPU memory, and 0.0 GB are free")
    (cell,) = (cell for cell in found["cells"] if (cell["requests"], cell["tokens"]) == (3, 100_000))
    assert cell["needed_bytes"] == needed
    assert cell["contenders"] == []
    assert f"attention {left}: {cell['left_out']}" in found["left_out"]
    assert len([cell for cell in found["cells"] if cell["left_out"] is None]) == 2


def test_an_interrupted_run_keeps_what_it_has(without_gpu, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "vllm", None)
    path = tmp_path / "grid.json"

    def say(line):
        if path.exists() and len(json.loads(path.read_text())["cells"]) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        grid_run.execute(GridOptions(ops=("attention",), axes=TINY, max_model_len=64), path, say)
    assert len(json.loads(path.read_text())["cells"]) == 2


def test_a_mean_is_geometric_and_names_its_extremes():
    mean = Mean("FlashMLA", "mla_attention", "bfloat16", {"one": 2.0, "other": 0.5, "third": 1.0}, 4)
    assert mean.value == pytest.approx(1.0)
    assert mean.line() == (
        "mla_attention, bfloat16 cache, beside FlashMLA: geometric mean 1.000x over 3 of 4 cells, from 0.50x (other) "
        "to 2.00x (one)"
    )
    assert mean.as_json() | {"geometric_mean": None} == {
        "library": "FlashMLA",
        "op": "mla_attention",
        "cache_dtype": "bfloat16",
        "cells": 4,
        "cells_with_ratio": 3,
        "geometric_mean": None,
        "least": 0.5,
        "most": 2.0,
    }


def test_each_cache_dtype_has_a_mean_of_its_own():
    results = [
        CellResult(kv_cell(cache_dtype=dtype, requests=requests), 1e-6, True, {}, {"FlashAttention 3": ratio})
        for dtype, requests, ratio in ((BF16, 1, 2.0), (BF16, 8, 8.0), (E4M3, 1, 3.0))
    ]
    found = [(it.cache_dtype, it.value) for it in means(results, {"attention": ["FlashAttention 3"]})]
    assert found == [("bfloat16", pytest.approx(4.0)), ("float8_e4m3fn", pytest.approx(3.0))]


def test_every_op_has_libraries_beside_it():
    assert [list(libraries(cell)) for cell in (kv_cell(), LATENTS)] == [
        ["FlashAttention 3"],
        ["FlashAttention 3", "FlashMLA"],
    ]


def test_a_line_has_time_rate_share_and_ratio():
    timings = {"atom": Timing(2e-5, 2e-5, 2e-5), "FlashAttention 3": Timing(4e-5, 4e-5, 4e-5)}
    result = CellResult(kv_cell(), 1e-5, True, timings, {"FlashAttention 3": 2.0})
    rates = [kv_cell().num_bytes / seconds / 1e9 for seconds in (2e-5, 4e-5)]
    assert result.line().endswith(
        f"atom     20.00 us {rates[0]:5.0f} GB/s  50%   FlashAttention 3     40.00 us {rates[1]:5.0f} GB/s  25% 2.00x"
    )


def test_a_cell_that_fits_the_cache_says_so(without_gpu, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "vllm", None)
    axes = axes_of({**vars(TINY), "requests": (1,), "tokens": (16, 64)}, False)
    # 256 copies at most: more than twice the cache is beyond the shorter cell.
    short, _ = GridOptions(ops=("attention",), axes=axes).cells()
    monkeypatch.setattr(grid_run, "cache_and_memory", lambda device: (150 * short.num_bytes, 1 << 30))
    lines, found = measured(GridOptions(ops=("attention",), axes=axes, max_model_len=64), tmp_path)
    assert [cell["fits_cache"] for cell in found["cells"]] == [True, False]
    assert [line.endswith("fits the cache of the GPU") for line in lines if "us" in line] == [True, False]


def test_contenders_take_turns_and_who_goes_first_alternates(monkeypatch):
    order = []
    monkeypatch.setattr(device, "warm", lambda run, seconds: {"a": 0.001, "b": 0.5}[run])
    monkeypatch.setattr(device, "sample", lambda run, count: order.append((run, count)) or len(order) / 1000)
    found = measure_in_turns({"ours": ["a", "a"], "theirs": ["b", "b"]}, rounds=2, sample_seconds=0.02)
    assert [run for run, _ in order] == ["a", "b", "b", "a", "b", "a", "a", "b"]
    assert {count for run, count in order if run == "a"} == {20}
    assert {count for run, count in order if run == "b"} == {1}
    assert found == {"ours": [0.001, 0.004, 0.006, 0.007], "theirs": [0.002, 0.003, 0.005, 0.008]}
