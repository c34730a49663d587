"""No request to a hybrid waits for a kernel: what real engines launch of Gated DeltaNet, the warm-up has launched."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.integration.questions import checkpoint
from tests.integration.recorded_launches import VARIABLE, Recorded
from tests.integration.sglang.offline import Ask, Engine, drafting, run
from tests.integration.sglang.test_hybrids import SNAPSHOTS, environ_of

pytestmark = pytest.mark.sglang

WARMED = Path(__file__).parent / "warmed_on_cpu"
OPTIONS = {
    "dtype": "float32",
    "disable_cuda_graph": True,
    "chunked_prefill_size": 64,
    "context_length": 512,
    "max_total_tokens": 4096,
    "max_running_requests": 12,
    "max_mamba_cache_size": 80,
    "mamba_track_interval": 64,
}
#: By name: the checkpoint, how states are kept for prefixes, how many tokens are drafted, and other options.
WAYS = {
    "Next, no prefixes": ("qwen3_next", "no_buffer", 0, {"disable_radix_cache": True}),
    "3.5, no copies": ("qwen3_5", "no_buffer", 0, {}),
    "Next, copies": ("qwen3_next", "extra_buffer", 0, {}),
    "3.5, mixed steps": ("qwen3_5", "extra_buffer", 0, {"enable_mixed_chunk": True}),
    "3.5, 1 draft": ("qwen3_5", "extra_buffer", 1, {}),
    "Next, 3 drafts, no copies": ("qwen3_next", "no_buffer", 3, {}),
}
EXACTLY = {"max_new_tokens": 6, "min_new_tokens": 6}


def tokens(count: int) -> list[int]:
    return [3 + at % 50 for at in range(count)]


@pytest.mark.parametrize("name", WAYS)
def test_what_an_engine_launches_its_warm_up_has_launched(name, tmp_path):
    family, strategy, drafts, others = WAYS[name]
    path = tmp_path / "launches.jsonl"
    copies = strategy != "no_buffer"
    options = {
        **OPTIONS,
        "mamba_radix_cache_strategy": strategy,
        "disable_overlap_schedule": not copies,
        **others,
    }
    together = Ask([tokens(count) for count in (1, 2, 5, 8, 9, 70, 130)] * 2, EXACTLY)
    asks = [Ask([tokens(3)], EXACTLY), together, together]
    environ = environ_of(SNAPSHOTS, drafts)
    root = Path(__file__).parents[3]
    environ |= {"PYTHONPATH": os.pathsep.join([str(WARMED), str(root), environ["PYTHONPATH"]]), VARIABLE: str(path)}
    run([Engine(checkpoint(family), True, asks, drafting(drafts, **options) if drafts else options, environ)])
    Recorded.read(path).assert_warm()
