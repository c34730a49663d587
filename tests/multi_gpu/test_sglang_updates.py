"""SGLang on two GPUs: weights that change on two ranks, and those that a trainer sends from a GPU of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gpu.test_sglang_updates import SHARED
from tests.integration.sglang.test_updates import RANKS, run_case
from tests.integration.sglang.updated import GPU_CALLS
from tests.integration.versions import FIRST, Case


@pytest.mark.parametrize("case", [*RANKS, FIRST[0]], ids=str)
def test_answers_are_those_of_a_fresh_start_bit_for_bit(tmp_path: Path, case: Case) -> None:
    """With one rank, the trainer of `update_weights_from_distributed` has the other GPU."""
    found = run_case(tmp_path, case, SHARED, None, 560.0)
    assert {call: found[call] for call in GPU_CALLS} == {call: [True, True] for call in GPU_CALLS}
    assert found["after refusals"]
