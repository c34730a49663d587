"""Our models over two GPUs, by tensor and by pipeline parallelism, give the tokens that vLLM's own gives on one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from benchmarks import CHECKPOINTS, FAMILIES, ROOT
from tests.integration.vllm.offline import Ask, Engine, Ran, run

NUM_PROMPTS = 100
#: Arguments of `LLM`; each engine has two processes, told apart from the others by their share of memory alone.
WAYS: Mapping[str, dict[str, Any]] = {
    "one": {},
    "tensor": {"tensor_parallel_size": 2},
    "pipeline": {"pipeline_parallel_size": 2},
    "tensor, eager": {"tensor_parallel_size": 2, "enforce_eager": True},
}

Key = tuple[str, str, str]


def _start(key: Key) -> Ran:
    family, impl, way = key
    rows = [json.loads(line) for line in (ROOT / "tests" / "evaluation" / "heldout.jsonl").read_text().splitlines()]
    ask = Ask([row["prompt"] for row in rows[:NUM_PROMPTS]], {"max_tokens": 32})
    limits = {"kv_cache_memory_bytes": 2 << 30, "gpu_memory_utilization": 0.05, "max_model_len": 1024}
    engine = Engine(str(CHECKPOINTS / family), impl, [ask], {**limits, "max_num_seqs": 64, **WAYS[way]})
    # Asking workers for their model's class goes through pickled functions.
    return run([engine], environ={"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}, deadline=540.0)[0]


@pytest.fixture(scope="module")
def engines() -> Mapping[Key, Future[Ran]]:
    """Every engine that the tests look at, all at once."""
    keys: list[Key] = [("qwen3", "atom", way) for way in WAYS] + [(family, "auto", "one") for family in FAMILIES]
    keys += [(family, "atom", way) for family in ("llama", "mistral") for way in ("tensor", "pipeline")]
    pool = ThreadPoolExecutor(len(keys))
    return {key: pool.submit(_start, key) for key in keys}


@pytest.mark.parametrize(
    ("family", "way"),
    [("qwen3", way) for way in WAYS]
    + [(family, way) for family in ("llama", "mistral") for way in ("tensor", "pipeline")],
)
def test_tokens_are_those_of_one_gpu(engines: Mapping[Key, Future[Ran]], family: str, way: str) -> None:
    ours, native = engines[family, "atom", way].result(), engines[family, "auto", "one"].result()
    assert ours.model_class.startswith("Atom")
    assert [answer.tokens for answer in ours.answers[0]] == [answer.tokens for answer in native.answers[0]]
