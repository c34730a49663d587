"""Greedy answers of native vLLM and atom to the held-out questions on a GPU, offline, graphs on; and atom twice.

    python -m benchmarks.gpu_accuracy                         # every trained checkpoint, 1, 16 and 64 requests at once

For machines without lm-eval: the same questions and the same exact match. A difference of accuracy is in points. Beside
it stands the share of answers whose tokens are all native's, and whether a second engine of atom gives the same tokens
and the very same log-probabilities.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import CHECKPOINTS, FAMILIES, IMPLEMENTATIONS, ROOT
from tests.integration.vllm.offline import Answer, Ask, Engine, run

#: Every answer is shorter.
MAX_TOKENS = 32
NUM_LOGPROBS = 5


def read_questions(count: int | None) -> list[dict[str, str]]:
    """The held-out questions."""
    lines = (ROOT / "tests" / "evaluation" / "heldout.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines[:count]]


def accuracy(answers: Sequence[Answer], questions: Sequence[dict[str, str]]) -> float:
    """The share whose first line is the right answer, as the scoring client has it."""
    right = (
        answer.text.strip("\n").partition("\n")[0].strip() == question["answer"]
        for answer, question in zip(answers, questions, strict=True)
    )
    return sum(right) / len(questions)


def equal_share(some: Sequence[Answer], others: Sequence[Answer]) -> float:
    """The share of answers with the same tokens."""
    return sum(one.tokens == other.tokens for one, other in zip(some, others, strict=True)) / len(some)


def differing(some: Sequence[Answer], others: Sequence[Answer]) -> int:
    """How many answers differ in a token or in any bit of a log-probability."""
    return sum(
        (one.tokens, one.logprobs) != (other.tokens, other.logprobs) for one, other in zip(some, others, strict=True)
    )


def measure(
    family: str, concurrency: int, questions: Sequence[dict[str, str]], arguments: argparse.Namespace
) -> dict[str, Any]:
    """A row of the table: three engines, each in a process of its own."""
    ask = Ask([question["prompt"] for question in questions], {"max_tokens": MAX_TOKENS, "logprobs": NUM_LOGPROBS})
    options = {
        "max_model_len": 1024,
        "max_num_seqs": concurrency,
        "gpu_memory_utilization": arguments.gpu_memory_utilization,
        "dtype": arguments.dtype,
        "kv_cache_dtype": arguments.kv_cache_dtype,
        "enable_prefix_caching": False,
        **({"quantization": arguments.quantization} if arguments.quantization else {}),
        **arguments.extra_engine_json,
    }

    def answers(name: str) -> tuple[list[Answer], str]:
        engine = Engine(str(CHECKPOINTS / family), IMPLEMENTATIONS[name], [ask], options)
        (ran,) = run([engine], deadline=arguments.deadline)
        assert (name == "atom") == ran.model_class.startswith("Atom"), ran.model_class
        return ran.answers[0], ran.graph_mode

    (native, _), (ours, graphs), (again, _) = answers("native"), answers("atom"), answers("atom")
    return {
        "checkpoint": family,
        "concurrency": concurrency,
        "questions": len(questions),
        "graphs": graphs,
        "native": accuracy(native, questions),
        "atom": accuracy(ours, questions),
        "points": 100 * (accuracy(ours, questions) - accuracy(native, questions)),
        "equal_tokens": equal_share(native, ours),
        "differing_between_runs": differing(ours, again),
    }


def line(row: dict[str, Any]) -> str:
    """A row for a person."""
    same = row["differing_between_runs"] == 0
    again = "bitwise equal" if same else f"{row['differing_between_runs']} answers differ"
    return (
        f"{row['checkpoint']:<10}{row['concurrency']:>4} at once  native {row['native']:.1%}  atom {row['atom']:.1%} "
        f"({row['points']:+.1f} points)  same tokens {row['equal_tokens']:.1%}  atom twice: {again}"
    )


def main() -> None:
    """One line a checkpoint and number of requests at once."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="+", default=list(FAMILIES))
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--num-questions", type=int, help="left out: all")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--quantization")
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.3)
    parser.add_argument("--extra-engine-json", type=json.loads, default={})
    parser.add_argument("--deadline", type=float, default=900.0, help="seconds for one engine")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    questions = read_questions(arguments.num_questions)
    rows = []
    for family in arguments.families:
        for concurrency in arguments.concurrency:
            rows.append(measure(family, concurrency, questions, arguments))
            print(line(rows[-1]), flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
