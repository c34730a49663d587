"""The matrix as tests: a sample of its cases by default, all of them by `--thorough`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from tests.flags.case import Case, Verdict
from tests.flags.runs import judged
from tests.integration.asked import cases_asked_for


def parameters(cases: Sequence[Case]) -> list[object]:
    """One a case."""
    return [case if case.sample else pytest.param(case, marks=pytest.mark.thorough) for case in cases]


def verdicts(framework: str, request: pytest.FixtureRequest, folder: Path) -> Mapping[Case, Verdict]:
    """How the cases went that tests of this module ask for."""
    return dict(judged(framework, cases_asked_for(request), folder))
