"""How far native vLLM and atom are from the truth: Hugging Face's model in float32.

    python -m benchmarks.parity                       # the trained test checkpoints, float32 and bfloat16

The log-probabilities of the whole vocabulary at every position of some held-out prompts, from the real engine
(`prompt_logprobs`). Distances are absolute differences divided by the spread of the true logits.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import CHECKPOINTS, FAMILIES, IMPLEMENTATIONS, ROOT


def engine_logprobs(model: str, impl: str, dtype: str, prompts: list[list[int]]) -> Any:
    """Log-probabilities of one engine: a ``[tokens - 1, vocabulary]`` float32 tensor for each prompt."""
    import torch
    from vllm import LLM, SamplingParams

    llm = LLM(
        model,
        model_impl=IMPLEMENTATIONS[impl],
        dtype=dtype,
        max_model_len=1024,
        max_logprobs=-1,
        enable_prefix_caching=False,
    )
    sampling = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=-1, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False)
    tensors = []
    for output in outputs:
        rows = [entry for entry in output.prompt_logprobs if entry]
        tensors.append(torch.tensor([[row[token].logprob for token in range(len(row))] for row in rows]))
    return tensors


def truth(model: str, prompts: list[list[int]]) -> tuple[Any, float]:
    """The same from Hugging Face in float32, and the spread of its logits."""
    import torch
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager").eval()
    tensors, spread = [], 0.0
    with torch.inference_mode():
        for prompt in prompts:
            logits = reference(torch.tensor([prompt])).logits[0, :-1]
            spread = max(spread, (logits.max() - logits.min()).item())
            tensors.append(logits.log_softmax(-1))
    return tensors, spread


def measure(model: str, impl: str, dtype: str, num_prompts: int) -> dict[str, float]:
    """Distances of one engine."""
    from transformers import AutoTokenizer

    rows = (ROOT / "tests" / "evaluation" / "heldout.jsonl").read_text().splitlines()[:num_prompts]
    tokenizer = AutoTokenizer.from_pretrained(model)
    prompts = [tokenizer(json.loads(row)["prompt"])["input_ids"] for row in rows]
    found = engine_logprobs(model, impl, dtype, prompts)
    wanted, spread = truth(model, prompts)
    differences = [(ours - true).abs() / spread for ours, true in zip(found, wanted, strict=True)]
    return {
        "largest": max(difference.max().item() for difference in differences),
        "mean": sum(difference.mean().item() for difference in differences) / len(differences),
        "spread": spread,
    }


def main() -> None:
    """Each engine in a process of its own; one line a checkpoint and dtype."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoints", type=Path, nargs="+", default=[CHECKPOINTS / family for family in FAMILIES])
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--num-prompts", type=int, default=8)
    parser.add_argument("--json", type=Path, help="write all figures there")
    parser.add_argument("--measure", choices=list(IMPLEMENTATIONS), help=argparse.SUPPRESS)
    parser.add_argument("--report", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        (model,), (dtype,) = arguments.checkpoints, arguments.dtypes
        figures = measure(str(model), arguments.measure, dtype, arguments.num_prompts)
        arguments.report.write_text(json.dumps(figures))
        return
    table = []
    heads = (f"{name:>16}" for name in ("native largest", "atom largest", "native mean", "atom mean"))
    print(f"{'checkpoint':<12}{'dtype':<10}{''.join(heads)}")
    for checkpoint in arguments.checkpoints:
        for dtype in arguments.dtypes:
            row: dict[str, Any] = {"checkpoint": checkpoint.name, "dtype": dtype}
            for impl in IMPLEMENTATIONS:
                row[impl] = _in_a_process(checkpoint, impl, dtype, arguments.num_prompts)
            table.append(row)
            native, atom = row["native"], row["atom"]
            print(
                f"{checkpoint.name:<12}{dtype:<10}{native['largest']:>16.2e}{atom['largest']:>16.2e}"
                f"{native['mean']:>16.2e}{atom['mean']:>16.2e}",
                flush=True,
            )
    if arguments.json:
        arguments.json.write_text(json.dumps(table, indent=1))


def _in_a_process(checkpoint: Path, impl: str, dtype: str, num_prompts: int) -> dict[str, float]:
    with tempfile.NamedTemporaryFile(suffix=".json") as report:
        command = [sys.executable, "-m", "benchmarks.parity", "--measure", impl, "--report", report.name]
        command += ["--checkpoints", str(checkpoint), "--dtypes", dtype, "--num-prompts", str(num_prompts)]
        process = subprocess.run(command, capture_output=True, text=True, check=False)
        if process.returncode:
            sys.stderr.write(process.stdout + process.stderr)
            raise SystemExit(f"the {impl} engine failed")
        figures: dict[str, float] = json.loads(Path(report.name).read_text())
    return figures


if __name__ == "__main__":
    main()
