"""Exact match of native vLLM and atom on the held-out questions, by lm-eval against the OpenAI endpoint.

    nox -s bench -- accuracy                          # every trained checkpoint, concurrency 1 and 16

A live `vllm serve` for each checkpoint and implementation; the client is lm-eval's `local-completions`, whose command
is looked for in LM_EVAL (nox sets it) and else on the PATH.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
from pathlib import Path

from benchmarks import CHECKPOINTS, FAMILIES, IMPLEMENTATIONS, ROOT
from tests.integration.server import VllmServer


def score(server: VllmServer, checkpoint: Path, concurrency: int) -> float:
    """Exact match of a running server."""
    arguments = {
        "model": str(checkpoint),
        "base_url": f"{server.url}/v1/completions",
        "num_concurrent": str(concurrency),
        "tokenizer_backend": "huggingface",
        "tokenizer": str(checkpoint),
    }
    with tempfile.TemporaryDirectory() as folder:
        command = [os.environ.get("LM_EVAL", "lm_eval"), "--model", "local-completions"]
        command += ["--model_args", ",".join(f"{key}={value}" for key, value in arguments.items())]
        command += ["--tasks", "word_problems", "--include_path", "tests/evaluation", "--output_path", folder]
        subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
        (results,) = Path(folder).rglob("results_*.json")
        figures: dict[str, float] = json.loads(results.read_text())["results"]["word_problems"]
    return figures["exact_match,stripped"]


def main() -> None:
    """One line a checkpoint and implementation."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="+", default=list(FAMILIES))
    parser.add_argument("--implementations", nargs="+", default=list(IMPLEMENTATIONS), choices=list(IMPLEMENTATIONS))
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 16])
    arguments = parser.parse_args()
    for family in arguments.families:
        checkpoint = CHECKPOINTS / family
        for name in arguments.implementations:
            with VllmServer(checkpoint, "--model-impl", IMPLEMENTATIONS[name], "--max-model-len", "1024") as server:
                scores = {count: score(server, checkpoint, count) for count in arguments.concurrency}
            line = "  ".join(f"concurrency {count}: {value:.1%}" for count, value in scores.items())
            print(f"{family:<10}{name:<10}{line}", flush=True)


if __name__ == "__main__":
    main()
