"""vLLM on two GPUs: weights that change on two ranks, and those that a trainer sends from a GPU of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gpu.test_vllm_updates import check_sent, updated
from tests.integration.versions import FIRST, Case
from tests.integration.vllm.test_updates import CALLS, RANKS


@pytest.mark.parametrize("case", RANKS, ids=str)
def test_answers_on_two_ranks_are_those_of_a_fresh_start_bit_for_bit(tmp_path: Path, case: Case) -> None:
    found = updated(case, tmp_path)
    assert found["differ"], "both versions answer alike"
    assert {call: found[call] for call in CALLS} == dict.fromkeys(CALLS, True)
    assert all(found["refused"].values())
    assert found["after refusals"]


@pytest.mark.parametrize("case", FIRST, ids=str)
def test_a_trainer_on_another_gpu_sends_weights_by_nccl(tmp_path: Path, case: Case) -> None:
    check_sent("nccl", case, tmp_path)
