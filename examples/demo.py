"""Serve a small trained model with the real vLLM or SGLang on this machine, on our core, and ask it a few questions.

`nox -s demo` runs this in an environment that has vLLM, `nox -s demo -- --framework sglang` in one that has SGLang. It
prints each question with the model's answer and the right one, then what the server said at its start: which model
class, attention class and kernels ran.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

from openai import OpenAI

from tests.integration.server import Server, ServerFailed, SglangServer, VllmServer

ROOT = Path(__file__).resolve().parent.parent


def questions(path: Path) -> list[dict[str, str]]:
    """The first held-out question of each kind."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return list({row["kind"]: row for row in reversed(rows)}.values())


def ask(server: Server, rows: list[dict[str, str]]) -> int:
    """Ask each question, print the answers, and return how many were right."""
    client = OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    right = 0
    for row in rows:
        completion = client.completions.create(
            model=server.model, prompt=row["prompt"], max_tokens=32, temperature=0, stop="\n"
        )
        answer = completion.choices[0].text.strip()
        right += answer == row["answer"]
        mark = "right" if answer == row["answer"] else f"wrong, it is {row['answer']}"
        print(f"  {row['question']}\n    {answer}  ({mark})")
    return right


def serve(framework: str, model: Path) -> Server:
    """The server of `framework` with our model, for short questions."""
    if framework == "sglang":
        return SglangServer(model, "--context-length", "512")
    return VllmServer(model, "--model-impl", "atom", "--max-model-len", "512")


def main() -> int:
    """Run the demonstration; 0 if the server answered and our model was the one that did."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--framework", choices=("vllm", "sglang"), default="vllm")
    parser.add_argument("--model", type=Path, default=ROOT / "tests" / "checkpoints" / "qwen3")
    parser.add_argument("--questions", type=Path, default=ROOT / "tests" / "evaluation" / "heldout.jsonl")
    arguments = parser.parse_args()

    server = serve(arguments.framework, arguments.model)
    print("Starting:", " ".join(server.command), flush=True)
    start = time.monotonic()
    try:
        with server:
            print(f"Ready after {time.monotonic() - start:.0f} s. Questions, with the model's answers:\n", flush=True)
            rows = questions(arguments.questions)
            right = ask(server, rows)
    except ServerFailed as error:
        print(f"\nThe demonstration failed. {error}", file=sys.stderr)
        return 1

    report = server.startup_report()
    print(f"\n{right} of {len(rows)} right. What the server said at its start:\n")
    print("\n".join(f"  {line}" for line in report))
    if not report:
        print("Nothing of ours: the framework ran its own model. `atom-plugin doctor` finds out why.", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
