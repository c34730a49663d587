"""Exact match of native vLLM and atom on the held-out questions, by lm-eval against the OpenAI endpoint.

    nox -s bench -- accuracy                          # every trained checkpoint, concurrency 1 and 16
    nox -s bench -- accuracy --copies FOLDER          # its checkpoints instead, such as quantised ones

A live `vllm serve` for each checkpoint and implementation: see `benchmarks._accuracy`.
"""

from __future__ import annotations

from pathlib import Path

from benchmarks import IMPLEMENTATIONS
from benchmarks._accuracy import MAX_LENGTH, compare
from tests.integration.server import VllmServer


def serve(name: str, checkpoint: Path) -> VllmServer:
    """A server of one implementation."""
    return VllmServer(checkpoint, "--model-impl", IMPLEMENTATIONS[name], "--max-model-len", str(MAX_LENGTH))


if __name__ == "__main__":
    compare(__doc__, serve)
