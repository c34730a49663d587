"""Public reports: each is served as Transformers serves it, or refused in one line that says why."""

from __future__ import annotations

import shutil

import pytest

from tests.cases import read_cases
from tests.fuzz.__main__ import NUM_TOKENS, originals
from tests.fuzz.judge import judged
from tests.fuzz.mutants import Mutant
from tests.unit.core.hugging_face import random_tokens


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    return {place.name: place for place in originals(tmp_path_factory.mktemp("sound"))}


@pytest.mark.parametrize("case", read_cases(), ids=str)
def test_a_report(tmp_path, sound, case):
    folder = tmp_path / case.name
    shutil.copytree(sound[case.family], folder)
    case.change(folder)
    names = (case.refused,) if case.refused else ()
    verdict = judged(folder, Mutant("a report", case.report, names), random_tokens(NUM_TOKENS))
    assert verdict.outcome == ("refused" if case.refused else "equal"), verdict.detail
    assert (case.refused or "") in verdict.detail
