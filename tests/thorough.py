"""Choose the cases of a test that always run; `nox -s tests -- --thorough` runs all of them.

Any two parameters' values meet in a chosen case ("all-pairs testing"), so faults of one value or of a combination of
two show. What a test runs on (a GPU, a dtype) takes turns instead, so each of its values has cases too.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterable, Sequence
from itertools import chain, combinations
from pathlib import Path
from typing import Any

import pytest

#: A case: the index of each parameter's value.
Case = tuple[int, ...]

#: Parameters that take turns.
TURNS = ("arch", "cache_dtype", "dtype", "gpu", "state_dtype")


def mark_thorough(items: Iterable[pytest.Item], folder: Path) -> None:
    """Mark the cases of a folder's parametrized tests that are not chosen."""
    tests: dict[str, dict[Case, list[pytest.Item]]] = defaultdict(lambda: defaultdict(list))
    for item in items:
        if isinstance(item, pytest.Function) and hasattr(item, "callspec") and item.path.is_relative_to(folder):
            # By what they are: of one test the same value is the same object.
            case = tuple(id(value) for name, value in item.callspec.params.items() if name not in TURNS)
            tests[item.nodeid.partition("[")[0]][case].append(item)
    for cases in tests.values():
        chosen = all_pairs(list(cases))
        examples: set[pytest.Item] = set()
        for number, case in enumerate(chosen):
            same = cases[case]
            turns = min(len(same), len(chosen))
            # A round later one begins with the next, or a parameter with as many values would always meet the same.
            examples.update(same[(number + number // turns) % turns :: turns])
        for item in chain.from_iterable(cases.values()):
            if item not in examples:
                item.add_marker("thorough")


def some(values: Iterable[Any], examples: Container[Any]) -> list[Any]:
    """Values of a test's parameter, each marked `thorough` that is no example."""
    return [it if it in examples else pytest.param(it, marks=pytest.mark.thorough) for it in values]


def all_pairs(cases: Sequence[Case]) -> list[Case]:
    """A small set of cases with every pair of values that occurs in ``cases``; all cases if there are no pairs."""
    pairs = {case: set(combinations(enumerate(case), 2)) for case in cases}
    missing = set().union(*pairs.values())
    if not missing:
        return list(cases)
    chosen = set()
    while missing:
        best = max(cases, key=lambda case: len(missing & pairs[case]))
        chosen.add(best)
        missing -= pairs[best]
    return [case for case in cases if case in chosen]
