"""The standard scoring client at our server: as many answers are right as from vLLM's own model.

Its command is looked for in LM_EVAL (nox sets it: lm-eval has an environment of its own), else on the PATH. The other
families, concurrency 1 and vLLM's own server are scored by the benchmarks.
"""

from __future__ import annotations

import json
import os
import shutil

import pytest

from tests.integration.processes import run_group
from tests.integration.questions import TESTS

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

# Half a point of a hundred.
TOLERANCE = 0.005


def test_lm_eval_counts_as_many_right_answers_as_vllms_own_model_gives(server, native, rows, tmp_path):
    lm_eval = os.environ.get("LM_EVAL") or shutil.which("lm_eval")
    assert lm_eval, "there is no lm-eval here: name its command in LM_EVAL"
    options = {
        "--model": "local-completions",
        "--model_args": f"model={server.model},base_url={server.url}/v1/completions,num_concurrent=16,"
        "max_retries=1,tokenizer_backend=None,tokenized_requests=False",
        "--tasks": "word_problems",
        "--limit": str(len(rows)),
        "--include_path": str(TESTS / "evaluation"),
        "--output_path": str(tmp_path),
    }
    command = [lm_eval, *(part for option in options.items() for part in option)]
    environ = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "huggingface"), "OPENAI_API_KEY": "none"}
    finished = run_group(command, environ, 300, TESTS.parent)  # the task names its file from there
    assert finished.returncode == 0, finished.tail()
    (report,) = tmp_path.rglob("results_*.json")
    score = json.loads(report.read_text())["results"]["word_problems"]["exact_match,stripped"]
    right = [answer.text.strip() == row.answer for answer, row in zip(native("qwen3").answers[0], rows, strict=True)]
    assert score == pytest.approx(sum(right) / len(rows), abs=TOLERANCE)
    assert score >= 0.9
