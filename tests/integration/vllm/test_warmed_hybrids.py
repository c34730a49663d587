"""No request to a hybrid waits for a kernel: what real engines launch of Gated DeltaNet, the warm-up has launched."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.questions import BY_VECTORS, checkpoint
from tests.integration.recorded_launches import VARIABLE, Recorded
from tests.integration.vllm.offline import Ask, Engine, run
from tests.integration.vllm.test_hybrids import ENVIRON, NEWER_RUNNER, drafts, recall

pytestmark = pytest.mark.vllm

V1 = {"max_num_batched_tokens": 96, "max_num_seqs": 16}
#: Interpreted, so it does less.
V2 = {"max_num_batched_tokens": 64, "max_num_seqs": 4, "enforce_eager": True}
#: By name: the checkpoint, the options, and whether the newer runner runs.
WAYS = {
    "Next": ("qwen3_next", V1, False),
    "3.5, no prefixes": ("qwen3_5", {**V1, "enable_prefix_caching": False}, False),
    "3.5, 1 draft": ("qwen3_5", {**V1, **drafts(1)}, False),
    "Next, 2 drafts": ("qwen3_next", {**V1, **drafts(2)}, False),
    "3.5 on V2": ("qwen3_5", V2, True),
    "3.5 on V2, 3 drafts": (
        "qwen3_5",
        {**V2, "speculative_config": {"method": "mtp", "num_speculative_tokens": 3}},
        True,
    ),
}


def tokens(count: int) -> list[int]:
    return [3 + at % 50 for at in range(count)]


@pytest.mark.parametrize("name", WAYS)
def test_what_an_engine_launches_its_warm_up_has_launched(name, tmp_path):
    family, options, newer = WAYS[name]
    path = tmp_path / "launches.jsonl"
    environ = {**(NEWER_RUNNER if newer else ENVIRON), VARIABLE: str(path)}
    short = {"max_tokens": 6, "ignore_eos": True}
    together = Ask([tokens(count) for count in (1, 2, 5, 8, 9, 70)] * (1 if newer else 3), short)
    asks = [Ask([tokens(3)], short), together, together]
    if not newer:
        asks.append(Ask([row["prompt"] for row in recall(4)], {"max_tokens": 8}))
        # The first two fill a step. With drafts, the prompt of one token is padded in the next, behind the longer one.
        asks.append(Ask([tokens(count) for count in (48, 48, 20, 1)], short))
    engine = Engine(checkpoint(family), "atom", asks, {"max_model_len": 1024, **BY_VECTORS, **options})
    script = Path(__file__).with_name("recorded.py")
    run([engine], environ=environ, script=script)
    Recorded.read(path).assert_warm()
