"""SGLang on a GPU: weights that change under captured graphs are those of the folder that they came from, bit for bit.

Each kind of model has an engine of its own, all at once: a start is mostly host work.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from tests.integration.asked import cases_asked_for
from tests.integration.sglang.test_updates import run_case
from tests.integration.sglang.updated import GPU_CALLS
from tests.integration.versions import CASES, FAULTS, Case

#: A stated pool: measuring what is free makes no sense while others start on it.
SHARED = {
    "device": "cuda",
    "sampling_backend": "pytorch",
    "context_length": 256,
    "max_running_requests": 8,
    "max_total_tokens": 8192,
    "mem_fraction_static": 0.9,
    "enable_memory_saver": True,
}


@pytest.fixture(scope="module")
def engines(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Mapping[str, Future[dict[str, Any]]]:
    """What the calls led to, of each case that is asked for."""
    asked = cases_asked_for(request)
    pool = ThreadPoolExecutor(len(CASES))

    def start(index: int, case: Case) -> dict[str, Any]:
        options = {**SHARED, "port": 32000 + 200 * index}
        return run_case(tmp_path_factory.mktemp("updates"), case, options, None, 500.0)

    return {case.name: pool.submit(start, index, case) for index, case in enumerate(CASES) if case in asked}


@pytest.mark.parametrize("call", GPU_CALLS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_answers_are_those_of_a_fresh_start_bit_for_bit(
    engines: Mapping[str, Future[dict[str, Any]]], case: Case, call: str
) -> None:
    assert engines[case.name].result()[call] == [True, True]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_after_refusals_it_answers_as_before(engines: Mapping[str, Future[dict[str, Any]]], case: Case) -> None:
    found = engines[case.name].result()
    assert all(FAULTS[fault][1] in said for fault, said in found["refused"].items())
    assert found["after refusals"]
    assert found["after a refused first bucket"]
    assert found["after a refused later bucket"]
