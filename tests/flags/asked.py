"""The matrix as tests: a sample of its cases by default, all of them by `--thorough`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from tests.flags.case import Case, Verdict
from tests.flags.runs import judged
from tests.integration.asked import cases_asked_for
from tests.thorough import some


def parameters(cases: Sequence[Case]) -> list[object]:
    """One a case."""
    return some(cases, [case for case in cases if case.sample])


def verdicts(framework: str, request: pytest.FixtureRequest, folder: Path) -> Mapping[Case, Verdict]:
    """How the cases went that tests of this module ask for."""
    return dict(judged(framework, cases_asked_for(request), folder))
