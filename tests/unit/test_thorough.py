"""Which cases are examples of the others."""

from __future__ import annotations

from itertools import combinations, product

import pytest

from tests.thorough import all_pairs

pytest_plugins = ["pytester"]

TESTS = """
import pytest
from tests.thorough import mark_thorough

@pytest.mark.parametrize("gpu", ["a", "b", "c"])
@pytest.mark.parametrize("size", range(1000, 1006))
def test_turns(size, gpu): ...

@pytest.mark.parametrize("dtype", ["a", "b", "c"])
@pytest.mark.parametrize("bias", [False, True])
def test_more_turns_than_cases(bias, dtype): ...

@pytest.mark.parametrize("dtype", ["a", "b"])
def test_no_cases(dtype): ...

@pytest.mark.parametrize("size", range(5))
@pytest.mark.parametrize("bias", [False, True])
def test_two(size, bias): ...

def test_alone(): ...
"""


@pytest.mark.parametrize("sizes", [(4, 3, 4), (7, 2, 2, 2), (2, 2), (3,), ()])
def test_all_pairs_meet_in_few_cases(sizes):
    cases = list(product(*map(range, sizes)))
    chosen = all_pairs(cases)
    wanted, found = ({pair for case in its for pair in combinations(enumerate(case), 2)} for its in (cases, chosen))
    assert found == wanted
    assert [case for case in cases if case in chosen] == chosen
    if len(sizes) > 2:
        assert len(chosen) <= 2 * max(sizes) * sorted(sizes)[-2]


def test_pairs_that_never_meet_are_not_looked_for():
    cases = [(0, 0, 0), (0, 1, 0), (1, 0, 1), (0, 0, 1)]
    assert set(all_pairs(cases)) == set(cases)


def test_what_a_test_runs_on_takes_turns(pytester):
    hook = "def pytest_collection_modifyitems(items): mark_thorough(items, __import__('pathlib').Path(__file__).parent)"
    pytester.makeconftest(f"from tests.thorough import mark_thorough\n{hook}")
    pytester.makeini("[pytest]\nmarkers = thorough: as here")
    pytester.makepyfile(TESTS)
    lines = pytester.runpytest("--collect-only", "-q", "-m", "not thorough").outlines
    chosen = {}
    for line in lines:
        name, _, case = line.partition("::")[2].partition("[")
        chosen.setdefault(name, []).append(case.rstrip("]"))
    assert chosen["test_turns"] == ["1000-a", "1001-b", "1002-c", "1003-b", "1004-c", "1005-a"]
    assert chosen["test_more_turns_than_cases"] == ["False-a", "False-c", "True-b"]
    assert chosen["test_no_cases"] == ["a", "b"]
    assert len(chosen["test_two"]) == 10
    assert chosen["test_alone"] == [""]
