"""A thousand short requests to a hybrid with few slots of states: each is used again and again.

The plug-in of `snapshots_on_cpu` fills each slot with NaN before a request has it.
"""

from __future__ import annotations

import random

import pytest

from tests.hybrid_checkpoints import Expected, make_hybrid, some_tokens
from tests.integration.sglang.offline import Ask, Engine, run
from tests.integration.sglang.test_hybrids import SNAPSHOTS, environ_of

pytestmark = [pytest.mark.sglang, pytest.mark.slow]

NUM_REQUESTS, NUM_SLOTS = 1000, 40
LONGEST = 9
#: Some are longer than a chunk, whose states are copied for others.
LENGTHS = (*range(1, 30), 63, 64, 65, 66, 67, 80, 100, 130)


def test_each_of_a_thousand_is_answered_right(tmp_path):
    folder = make_hybrid(tmp_path / "it", "qwen3_5")
    prompts = [some_tokens(length, length) for length in LENGTHS]
    known = Expected.of(folder).greedy(prompts, LONGEST)
    drawn = random.Random(5)
    asked = [(drawn.randrange(len(prompts)), drawn.randint(1, LONGEST)) for _ in range(NUM_REQUESTS)]
    sampling = [{"temperature": 0.0, "max_new_tokens": count, "min_new_tokens": count} for _, count in asked]
    options = {
        "dtype": "float32",
        "disable_cuda_graph": True,
        "chunked_prefill_size": 64,
        "max_total_tokens": 1024,
        "max_running_requests": 12,
        "max_mamba_cache_size": NUM_SLOTS,
        "mamba_radix_cache_strategy": "extra_buffer",
        "mamba_track_interval": 64,
        "log_level": "warning",
    }
    ask = Ask([prompts[at] for at, _ in asked], {}, {"sampling_params": sampling})
    (ran,) = run([Engine(str(folder), True, [ask], options, environ_of(SNAPSHOTS, 0))])
    (answers,) = ran.answers
    assert [answer.tokens for answer in answers] == [known[at][:count] for at, count in asked]
    assert sum(answer.meta["cached_tokens"] > 0 for answer in answers) > NUM_REQUESTS / 20
