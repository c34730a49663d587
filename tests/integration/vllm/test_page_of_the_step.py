"""vLLM hands a page on in the step that fills it: what our attention has to be ready for."""

from __future__ import annotations

import pytest

from tests.integration.questions import checkpoint
from tests.integration.vllm.page_of_the_step import check

pytestmark = pytest.mark.vllm


def test_a_request_reads_what_another_writes_in_the_same_step():
    options = {"model": checkpoint("qwen3"), "model_impl": "atom", "dtype": "float32", "max_model_len": 512}
    options |= {"block_size": 32, "max_num_seqs": 4, "kv_cache_memory_bytes": 64 << 20}
    check(options, {}, tolerance=1e-3)
