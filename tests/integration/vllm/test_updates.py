"""Weights that change while real vLLM serves: each of its calls, by kind of model and dtype."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.integration.mixtures import make_drafting
from tests.integration.once import once
from tests.integration.preloaded import run_script
from tests.integration.versions import CASES, FAULTS, FIRST, Case, make_other
from tests.thorough import some

pytestmark = pytest.mark.vllm

DENSE, *OTHERS = CASES
TWO_RANKS = Case("dense, two ranks", "qwen3", options={"tensor_parallel_size": 2})
EXPERTS_APART = Case(
    "mixture, two ranks of experts", "qwen3_moe", options={"tensor_parallel_size": 2, "enable_expert_parallel": True}
)
RANKS = (TWO_RANKS, EXPERTS_APART)
CALLS = ("reload by path", "reload in place", "reload by iterator", "transfer", "parts", "sleep")
every_case = pytest.mark.parametrize(
    "case",
    [
        pytest.param(DENSE, marks=pytest.mark.smoke),
        *some(OTHERS, FIRST),
        *(pytest.param(it, marks=pytest.mark.slow) for it in RANKS),
    ],
    ids=str,
)


def run(folder: Path, cases: dict[str, Any], deadline: float = 400.0, **variables: str) -> dict[str, Any]:
    given, wanted = folder / "cases.json", folder / "found.json"
    given.write_text(json.dumps(cases))
    # Functions go to workers of other processes.
    environ = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_ALLOW_INSECURE_SERIALIZATION": "1", **variables}
    finished = run_script(Path(__file__).with_name("updated.py"), [str(given), str(wanted)], environ, deadline)
    assert finished.returncode == 0, f"exit code {finished.returncode}:\n{finished.tail()}"
    found: dict[str, Any] = json.loads(wanted.read_text())
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Of a case, what its calls led to; those that share a process are run at once."""

    @once
    def together(cases: tuple[Case, ...]) -> dict[str, Any]:
        folder = tmp_path_factory.mktemp("updates")
        made = {}
        for case in cases:
            place = folder / case.name
            old, new = case.make(place)
            bad = {fault: place / f"bad, {fault}" for fault in FAULTS}
            for fault, (make, _) in FAULTS.items():
                make(new, bad[fault])
            ranks = {"distributed_executor_backend": "mp"} if case in RANKS else {}
            options = {**ranks, **case.options, **({"quantization": case.quantization} if case.quantization else {})}
            made[case.name] = {
                "old": str(old),
                "new": str(new),
                "bad": {fault: str(it) for fault, it in bad.items()},
                "options": options,
            }
        return run(folder, made)

    def of(case: Case) -> dict[str, Any]:
        cases = tuple(it for it in OTHERS if (it in FIRST) == (case in FIRST)) if case in OTHERS else (case,)
        result: dict[str, Any] = together(cases)[case.name]
        assert result["differ"], "both versions answer alike"
        return result

    return of


@pytest.mark.parametrize("call", CALLS)
@every_case
def test_answers_are_those_of_a_fresh_start_bit_for_bit(found, case, call):
    assert found(case)[call]


@pytest.mark.parametrize("fault", FAULTS)
@every_case
def test_a_bad_folder_is_refused_with_its_name_and_the_old_weights_stay(found, case, fault):
    said = found(case)["refused"][fault]
    assert FAULTS[fault][1] in said
    assert f"bad, {fault}" in said, "the folder"
    assert "Nothing was overwritten" in said


@every_case
def test_after_refusals_it_answers_as_before_and_knows_where_its_weights_are(found, case):
    assert found(case)["after refusals"]
    assert found(case)["in place after refusals"]


@pytest.mark.parametrize("case", some(CASES, FIRST), ids=str)
def test_a_transfer_that_breaks_off_leaves_a_model_that_says_so_until_a_whole_one(found, case):
    between, refusal, after = found(case)["bad transfer"]
    assert "the update has not ended" in between
    assert "misshapen (1)" in refusal
    assert "No request is served until a whole update has arrived" in refusal
    assert "a part of an update was refused" in after
    assert found(case)["after a bad transfer"]


def test_sinks_go_to_vllms_own_attention_again(tmp_path):
    old, new = Case("sinks", "gpt_oss").make(tmp_path)
    case = {"old": str(old), "new": str(new), "bad": {}, "options": {}}
    it = run(tmp_path, {"sinks": case}, ATOM_DISABLE_VLLM_ATTENTION="1")["sinks"]
    assert it["differ"]
    assert all(it[call] for call in CALLS)


def test_a_draft_is_updated_beside_its_target(tmp_path):
    (tmp_path / "old").mkdir()
    make_drafting(tmp_path / "old")
    make_other(tmp_path / "old", tmp_path / "new")
    options = {"dtype": "float32", "speculative_config": {"method": "mtp", "num_speculative_tokens": 2}}
    case = {"old": str(tmp_path / "old"), "new": str(tmp_path / "new"), "bad": {}, "options": options}
    it = run(tmp_path, {"drafts": case})["drafts"]
    assert it["differ"]
    assert it["transfer"]
    assert it["right drafts"][0] == it["right drafts"][1]
