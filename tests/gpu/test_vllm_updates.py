"""vLLM on a GPU: weights that change under captured graphs are those of a fresh start, bit for bit.

Each kind of model has a process of its own, all at once: a start is mostly host work.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.integration.asked import cases_asked_for
from tests.integration.preloaded import run_script
from tests.integration.versions import CASES, FAULTS, FIRST, Case
from tests.integration.vllm.test_updates import CALLS, run

#: A stated share of the GPU: measuring what is free makes no sense while others start on it.
SHARE = {"gpu_memory_utilization": 0.05, "max_num_seqs": 8}


def updated(case: Case, folder: Path) -> dict[str, Any]:
    """What the calls of a case led to."""
    old, new = case.make(folder)
    bad = {fault: folder / f"bad, {fault}" for fault in FAULTS}
    for fault, (make, _) in FAULTS.items():
        make(new, bad[fault])
    quantization = {"quantization": case.quantization} if case.quantization else {}
    made = {"new": str(new), "bad": {}, "options": {**SHARE, **case.options, **quantization}}
    # Two processes: on a GPU a second engine of one process cannot capture graphs.
    fresh = run(folder, {case.name: {**made, "old": None}}, deadline=250.0)[case.name]["fresh"]
    (folder / "fresh.json").write_text(json.dumps(fresh))
    made |= {"old": str(old), "fresh": str(folder / "fresh.json")}
    made["bad"] = {fault: str(it) for fault, it in bad.items()}
    found: dict[str, Any] = run(folder, {case.name: made}, deadline=400.0)[case.name]
    return found


def check_sent(backend: str, case: Case, folder: Path) -> None:
    """What a trainer of vLLM's own sends is what the engine has then; see :mod:`tests.gpu.transferred`."""
    old, new = case.make(folder)
    quantization = {"quantization": case.quantization} if case.quantization else {}
    options, found = json.dumps({**SHARE, **case.options, **quantization}), folder / "found.json"
    environ = {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}  # handles go to workers as objects

    def answers(*arguments: str) -> list[Any]:
        script = Path(__file__).with_name("transferred.py")
        finished = run_script(script, [*arguments, options, str(found)], environ, 250.0)
        assert finished.returncode == 0, f"exit code {finished.returncode}:\n{finished.tail()}"
        read: list[Any] = json.loads(found.read_text())
        return read

    (fresh,) = answers("fresh", str(new), str(new))
    of_old, first, back, again = answers(backend, str(old), str(new))
    assert of_old != fresh, "both versions answer alike"
    assert first == fresh
    assert back == of_old
    assert again == fresh


@pytest.fixture(scope="module")
def engines(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Mapping[str, Future[dict[str, Any]]]:
    """What the calls led to, of each case that is asked for."""
    asked = cases_asked_for(request)
    pool = ThreadPoolExecutor(len(CASES))
    folders = {case: tmp_path_factory.mktemp("updates") for case in asked}
    return {case.name: pool.submit(updated, case, folder) for case, folder in folders.items()}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_answers_are_those_of_a_fresh_start_bit_for_bit(
    engines: Mapping[str, Future[dict[str, Any]]], case: Case, call: str
) -> None:
    found = engines[case.name].result()
    assert found["differ"], "both versions answer alike"
    assert found[call]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_after_refusals_it_answers_as_before(engines: Mapping[str, Future[dict[str, Any]]], case: Case) -> None:
    found = engines[case.name].result()
    assert all(found["refused"].values())
    assert found["after refusals"]
    assert found["in place after refusals"]


@pytest.mark.parametrize("case", FIRST, ids=str)
def test_a_trainer_on_the_same_gpu_sends_weights_by_ipc(tmp_path: Path, case: Case) -> None:
    check_sent("ipc", case, tmp_path)
