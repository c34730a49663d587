"""Exact match of native SGLang and atom on the held-out questions, by lm-eval against the OpenAI endpoint.

    nox -s bench -- sglang_accuracy                   # every trained checkpoint, concurrency 1 and 16

A live server for each checkpoint and implementation: see `benchmarks._accuracy`. On a CPU native SGLang's rope wants
one op of vLLM, and gets the one that the tests have, in torch.
"""

from __future__ import annotations

import os
from pathlib import Path

from benchmarks import SGLANG_STAND_INS
from benchmarks._accuracy import MAX_LENGTH, compare
from tests.integration.server import SglangServer


def serve(name: str, checkpoint: Path) -> SglangServer:
    """A server of one implementation."""
    path = os.pathsep.join([str(SGLANG_STAND_INS), os.environ.get("PYTHONPATH", "")])
    native = {"SGLANG_EXTERNAL_MODEL_PACKAGE": None, "PYTHONPATH": path}
    # No core for a scheduler that waits.
    flags = ("--context-length", str(MAX_LENGTH), "--sleep-on-idle")
    return SglangServer(checkpoint, *flags, environ=native if name == "native" else None)


if __name__ == "__main__":
    compare(__doc__, serve)
