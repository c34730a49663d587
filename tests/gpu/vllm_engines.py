"""Engines of vLLM that start side by side on one GPU, and what they are asked."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from benchmarks import CHECKPOINTS, ROOT
from tests.integration.vllm.offline import Ask, Engine

NUM_PROMPTS = 200


def held_out() -> list[dict[str, str]]:
    """Questions with their answers, which no checkpoint was trained on."""
    lines = (ROOT / "tests" / "evaluation" / "heldout.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines[:NUM_PROMPTS]]


def engine(family: str, impl: str, options: Mapping[str, Any], asks: list[Ask]) -> Engine:
    """One with a stated cache size: measuring what is free makes no sense while others start on the same GPU."""
    limits = {"kv_cache_memory_bytes": 2 << 30, "gpu_memory_utilization": 0.05, "max_model_len": 1024}
    return Engine(str(CHECKPOINTS / family), impl, asks, {**limits, "max_num_seqs": 64, **options})
