"""Flags and request parameters of vLLM do with our models what they do natively."""

from __future__ import annotations

import pytest

from tests.flags.asked import parameters, verdicts
from tests.flags.vllm_cases import CASES

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def found(request, tmp_path_factory):
    """How each case went."""
    return verdicts("vllm", request, tmp_path_factory.mktemp("flags"))


@pytest.mark.parametrize("case", parameters(CASES), ids=str)
def test_answers_and_log_probabilities_are_those_of_the_native_model(found, case):
    assert not found[case].is_fault, found[case]
