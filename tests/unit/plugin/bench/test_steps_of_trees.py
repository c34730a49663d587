"""What of `benchmarks.steps_of_trees` needs no GPU."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from benchmarks import ROOT
from benchmarks._runs import Shape
from benchmarks.steps_of_trees import lines, main, source_tree, turns


def test_a_folder_without_our_source_is_refused(tmp_path):
    assert source_tree(str(ROOT / "src")) == ROOT / "src"
    with pytest.raises(argparse.ArgumentTypeError, match="there is no atom_core in it"):
        source_tree(str(tmp_path))


def test_who_goes_first_alternates_and_all_are_timed_as_often():
    order = turns(2, 3, 2)
    assert order[:4] == [(0, 0), (0, 1), (1, 1), (1, 0)]
    assert [tree for graph, tree in order if graph == 0] == [0, 1, 1, 0]
    assert all(order.count((graph, tree)) == 2 for graph in range(3) for tree in range(2))


def test_each_tree_is_told_beside_the_first():
    found = lines(Shape(8, 640), [Path("before"), Path("after")], {0: [2.0, 2.2], 1: [2.1, 1.89]})
    assert [line.split() for line in found] == [
        "8x640 2.1000 ms (2.0000 to 2.2000) +0.00% before".split(),
        "8x640 1.9950 ms (1.8900 to 2.1000) -5.00% after".split(),
    ]


@pytest.mark.parametrize("wrong", [["--shape", "8"], ["--shape", "8x640", "--layers", "two"], []])
def test_wrong_options_end_with_a_sentence(wrong, capsys):
    with pytest.raises(SystemExit):
        main(["deepseek-v2-lite", str(ROOT / "src"), *wrong])
    assert "error: " in capsys.readouterr().err
