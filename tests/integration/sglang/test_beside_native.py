"""Flags and request parameters of SGLang do with our models what they do natively."""

from __future__ import annotations

import pytest

from tests.flags.asked import parameters, verdicts
from tests.flags.sglang_cases import CASES

pytestmark = pytest.mark.sglang


@pytest.fixture(scope="module")
def found(request, tmp_path_factory):
    """How each case went."""
    return verdicts("sglang", request, tmp_path_factory.mktemp("flags"))


@pytest.mark.parametrize("case", parameters(CASES), ids=str)
def test_answers_and_log_probabilities_are_those_of_the_native_model(found, case):
    assert not found[case].is_fault, found[case]
