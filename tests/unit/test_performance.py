"""The page of performance shows what its figures say."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FIGURES = ROOT / "docs" / "figures"
PAGE = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")


def _tool():
    spec = importlib.util.spec_from_file_location("performance", ROOT / "tools" / "performance.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


TOOL = _tool()
RUNS = TOOL.runs()


def _run(*results, model="a model", machine="one GPU", native="its defaults", command="measure", shown=True):
    return {
        "model": model,
        "framework": "vLLM",
        "version": "1.2",
        "machine": machine,
        "in_table": shown,
        "native_ran_with": native,
        "command": command,
        "results": list(results),
    }


@pytest.mark.parametrize("machine", TOOL.machines(RUNS))
def test_each_machine_has_its_table_on_the_page(machine):
    block = f"<!-- generated: python tools/performance.py {machine} -->\n\n{TOOL.table(RUNS, machine)}\n\n<!-- end"
    assert block in PAGE, "run `python tools/generated.py`"


@pytest.mark.parametrize("file", sorted(FIGURES.glob("*.json")), ids=lambda file: file.name)
def test_each_file_of_figures_is_linked(file):
    json.loads(file.read_text(encoding="utf-8"))
    assert f"(figures/{file.name})" in PAGE


def test_a_ratio_is_native_by_atom():
    for run in RUNS:
        for result in run["results"]:
            times = result.get("native_ms"), result.get("atom_ms")
            if all(isinstance(time, float | int) for time in times) and isinstance(result.get("ratio"), float | int):
                # The ratio is a median of pairs, so it is near the ratio of the medians and not the same.
                assert result["ratio"] == pytest.approx(times[0] / times[1], rel=0.25), (run["model"], result)
                least, most = result.get("ratio_spread", (result["ratio"],) * 2)
                assert least <= result["ratio"] <= most, (run["model"], result)


def test_what_native_lacks_is_marked_and_explained():
    for lacking, mark in TOOL.MARKS.items():
        assert f"| {lacking} {mark} |" in PAGE
        assert f"\n{mark} " in PAGE


def test_a_row_has_ratio_spread_native_and_command():
    one = _run({"requests": 1, "ratio": 1.5, "ratio_spread": [1.4, 1.6]}, {"requests": 8, "ratio": 1.25})
    other = _run({"requests": 8, "ratio": 1.1}, model="another", native="Triton's attention", command="measure it")
    lines = TOOL.table(
        [one, other, _run(machine="two GPUs"), _run(model="hidden", shown=False)], "one GPU"
    ).splitlines()
    assert lines == [
        "| model | framework | 1 request | 8 requests | native ran with | command |",
        "| --- | --- | --- | --- | --- | --- |",
        "| a model | vLLM 1.2 | 1.50 (1.40 to 1.60) | 1.25 | its defaults | 1 |",
        "| another | vLLM 1.2 |  | 1.10 | Triton's attention ² | 2 |",
        "",
        "The commands:",
        "",
        "    1.  measure",
        "    2.  measure it",
    ]


def test_several_comparisons_are_one_row_with_least_and_most():
    first = _run({"requests": 1, "ratio": 1.5, "ratio_spread": [0.9, 2.0]}, command="first")
    second = _run({"requests": 1, "ratio": [1.25, 1.75]}, command="second")
    lines = TOOL.table([first, second], "one GPU").splitlines()
    assert lines[2] == "| a model | vLLM 1.2 | 1.25 to 1.75 | its defaults | 1 |"
    assert lines[-2:] == ["    1.  first", "        second"]


def test_a_machine_without_figures_is_told():
    with pytest.raises(ValueError, match=r"'three GPUs' has no table; those that have: one GPU"):
        TOOL.table([_run({"requests": 1, "ratio": 1.5})], "three GPUs")
