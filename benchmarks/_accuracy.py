"""Exact match of a framework's own model and of atom on the held-out questions, by lm-eval against the OpenAI endpoint.

A live server for each checkpoint and implementation; the client is lm-eval's `local-completions`, whose command is
looked for in LM_EVAL (nox sets it) and else on the PATH. A benchmark says how a server is made; its main is `compare`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

from benchmarks import CHECKPOINTS, FAMILIES, IMPLEMENTATIONS, ROOT
from tests.integration.server import Server

#: Prompt and answer fit with room to spare.
MAX_LENGTH = 1024


def score(server: Server, concurrency: int) -> float:
    """Exact match of a running server."""
    arguments = {
        "model": server.model,
        "base_url": f"{server.url}/v1/completions",
        "num_concurrent": str(concurrency),
        "tokenizer_backend": "huggingface",
        "tokenizer": server.model,
    }
    with tempfile.TemporaryDirectory() as folder:
        command = [os.environ.get("LM_EVAL", "lm_eval"), "--model", "local-completions"]
        command += ["--model_args", ",".join(f"{key}={value}" for key, value in arguments.items())]
        command += ["--tasks", "word_problems", "--include_path", "tests/evaluation", "--output_path", folder]
        subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
        (results,) = Path(folder).rglob("results_*.json")
        figures: dict[str, float] = json.loads(results.read_text())["results"]["word_problems"]
    return figures["exact_match,stripped"]


def compare(description: str | None, serve: Callable[[str, Path], Server]) -> None:
    """The command line: one line a checkpoint and implementation.

    Args:
        description: what `--help` says.
        serve: makes the server of an implementation, by its name, and a checkpoint.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="+", default=list(FAMILIES))
    parser.add_argument("--implementations", nargs="+", default=list(IMPLEMENTATIONS), choices=list(IMPLEMENTATIONS))
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 16])
    arguments = parser.parse_args()
    for family in arguments.families:
        for name in arguments.implementations:
            with serve(name, CHECKPOINTS / family) as server:
                scores = {count: score(server, count) for count in arguments.concurrency}
            line = "  ".join(f"concurrency {count}: {value:.1%}" for count, value in scores.items())
            print(f"{family:<10}{name:<10}{line}", flush=True)
