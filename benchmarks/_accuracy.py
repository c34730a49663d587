"""Exact match of a framework's own model and of atom on the held-out questions, by lm-eval against the OpenAI endpoint.

Each checkpoint and implementation gets a live server. The client is lm-eval's `local-completions`; its command is in
LM_EVAL, which nox sets, or on the PATH. A benchmark says how a server is started; its main is `compare`. With `--copies
FOLDER` the checkpoints in FOLDER are scored, for example those of `tools/checkpoints/quantize.py`. If a framework's own
model cannot serve one, its log's error is printed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

from benchmarks import CHECKPOINTS, FAMILIES, IMPLEMENTATIONS, ROOT
from tests.integration.server import Server, ServerFailed

LM_EVAL = os.environ.get("LM_EVAL", "lm_eval")
#: Enough for prompt and answer.
MAX_LENGTH = 1024


def score(server: Server, concurrency: int) -> float:
    """Exact match of a running server.

    Raises:
        ServerFailed: lm-eval failed, for example because the server ended.
    """
    arguments = {
        "model": server.model,
        "base_url": f"{server.url}/v1/completions",
        "num_concurrent": str(concurrency),
        "tokenizer_backend": "huggingface",
        "tokenizer": server.model,
    }
    with tempfile.TemporaryDirectory() as folder:
        command = [LM_EVAL, "--model", "local-completions"]
        command += ["--model_args", ",".join(f"{key}={value}" for key, value in arguments.items())]
        command += ["--tasks", "word_problems", "--include_path", "tests/evaluation", "--output_path", folder]
        ran = subprocess.run(command, cwd=ROOT, check=False, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        if ran.returncode:
            said = ran.stderr.decode(errors="replace").rstrip()
            last = said.rpartition("\n")[2]
            raise ServerFailed(f"lm-eval ended with exit code {ran.returncode}: {last}", f"{said}\n{server.log}", None)
        (results,) = Path(folder).rglob("results_*.json")
        figures: dict[str, float] = json.loads(results.read_text())["results"]["word_problems"]
    return figures["exact_match,stripped"]


def last_error(log: str) -> str:
    """The error in a log; an engine that fails to start logs the reason before the final failure."""
    lines = (re.match(r"(?:.*?\] )?\s*(\w+Error(?:: .*)?)$", line) for line in log.splitlines())
    causes = [match[1] for match in lines if match and "Engine core" not in match[1]]
    return causes[-1] if causes else "its log names no error"


def compare(description: str | None, serve: Callable[[str, Path], Server]) -> None:
    """The command line: one line a checkpoint and implementation.

    Args:
        description: what `--help` says.
        serve: makes the server of an implementation, by its name, and a checkpoint.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--families", nargs="+", default=list(FAMILIES))
    which.add_argument("--copies", type=Path, metavar="FOLDER", help="score the checkpoints in this folder instead")
    parser.add_argument("--implementations", nargs="+", default=list(IMPLEMENTATIONS), choices=list(IMPLEMENTATIONS))
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 16])
    arguments = parser.parse_args()
    if shutil.which(LM_EVAL) is None:
        parser.error(f"there is no command {LM_EVAL}: pip install 'lm-eval[api]', or name it in LM_EVAL")
    checkpoints = [CHECKPOINTS / family for family in arguments.families]
    if arguments.copies is not None:
        checkpoints = sorted(path.parent.resolve() for path in arguments.copies.glob("*/config.json"))
        if not checkpoints:
            parser.error(f"--copies {arguments.copies} holds no folder with a config.json")
    width = 2 + max(len(checkpoint.name) for checkpoint in checkpoints)
    for checkpoint in checkpoints:
        for name in arguments.implementations:
            try:
                with serve(name, checkpoint) as server:
                    scores = {count: score(server, count) for count in arguments.concurrency}
                line = "  ".join(f"concurrency {count}: {value:.1%}" for count, value in scores.items())
            except ServerFailed as failed:
                if name == "atom":
                    raise
                line = f"cannot serve it: {last_error(failed.log)}"
            print(f"{checkpoint.name:<{width}}{name:<10}{line}", flush=True)
