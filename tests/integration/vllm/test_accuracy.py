"""The standard scoring client at our server: as many answers are right as from vLLM's own model.

The other families, concurrency 1 and vLLM's own server are scored by hand with the benchmarks.
"""

from __future__ import annotations

import json
import sys

import pytest

from tests.integration.processes import run_group
from tests.integration.vllm.conftest import TESTS

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

# Half a point of a hundred.
TOLERANCE = 0.005


def test_lm_eval_counts_as_many_right_answers_as_vllms_own_model_gives(server, native, rows, tmp_path):
    pytest.importorskip("lm_eval", reason="only the newest framework's environment has lm-eval")
    options = {
        "--model": "local-completions",
        "--model_args": f"model={server.model},base_url={server.url}/v1/completions,num_concurrent=16,"
        "max_retries=1,tokenizer_backend=None,tokenized_requests=False",
        "--tasks": "word_problems",
        "--include_path": str(TESTS / "evaluation"),
        "--output_path": str(tmp_path),
    }
    command = [sys.executable, "-m", "lm_eval", *(part for option in options.items() for part in option)]
    environ = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "huggingface"), "OPENAI_API_KEY": "none"}
    finished = run_group(command, environ, 300, TESTS.parent)  # the task names its file from there
    assert finished.returncode == 0, finished.tail()
    (report,) = tmp_path.rglob("results_*.json")
    score = json.loads(report.read_text())["results"]["word_problems"]["exact_match,stripped"]
    right = [answer.text.strip() == row.answer for answer, row in zip(native("qwen3").answers[0], rows, strict=True)]
    assert score == pytest.approx(sum(right) / len(rows), abs=TOLERANCE)
    assert score >= 0.9
