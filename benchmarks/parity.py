"""How far native vLLM and atom are from the truth: Hugging Face's model in float32.

    python -m benchmarks.parity                       # the trained test checkpoints, float32 and bfloat16

The log-probabilities of the whole vocabulary at every position of some held-out prompts, from the real engine
(`prompt_logprobs`). Distances are absolute differences divided by the spread of the true logits. Hugging Face's model
in the same dtype stands beside them. Where native cannot run a checkpoint on this machine, its last words are printed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import CHECKPOINTS, FAMILIES, HYBRIDS, IMPLEMENTATIONS, ROOT, VLLM_STAND_INS

#: What is measured: the engines, and Hugging Face's model in the engines' dtype.
MEASURED = ("native", "atom", "transformers")


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


def hugging_face(model: str, dtype: str, prompts: list[list[int]]) -> tuple[Any, float]:
    """The same from Hugging Face, and the spread of its logits."""
    import torch
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype), attn_implementation="eager")
    reference.eval()
    tensors, spread = [], 0.0
    with torch.inference_mode():
        for prompt in prompts:
            logits = reference(torch.tensor([prompt])).logits[0, :-1].float()
            spread = max(spread, (logits.max() - logits.min()).item())
            tensors.append(logits.log_softmax(-1))
    return tensors, spread


def measure(model: str, impl: str, dtype: str, num_prompts: int) -> dict[str, float]:
    """Distances of one of :data:`MEASURED`."""
    from transformers import AutoTokenizer

    rows = (ROOT / "tests" / "evaluation" / "heldout.jsonl").read_text().splitlines()[:num_prompts]
    tokenizer = AutoTokenizer.from_pretrained(model)
    prompts = [tokenizer(json.loads(row)["prompt"])["input_ids"] for row in rows]
    if impl == "transformers":
        found, _ = hugging_face(model, dtype, prompts)
    else:
        found = engine_logprobs(model, impl, dtype, prompts)
    wanted, spread = hugging_face(model, "float32", prompts)
    differences = [(ours - true).abs() / spread for ours, true in zip(found, wanted, strict=True)]
    return {
        "largest": max(difference.max().item() for difference in differences),
        "mean": sum(difference.mean().item() for difference in differences) / len(differences),
        "spread": spread,
    }


def main() -> None:
    """Each engine in a process of its own; one line a checkpoint and dtype."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = [CHECKPOINTS / name for name in (*FAMILIES, *HYBRIDS)]
    parser.add_argument("--checkpoints", type=Path, nargs="+", default=known)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--num-prompts", type=int, default=8)
    parser.add_argument("--json", type=Path, help="write all figures there")
    parser.add_argument("--measure", choices=MEASURED, help=argparse.SUPPRESS)
    parser.add_argument("--report", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        (model,), (dtype,) = arguments.checkpoints, arguments.dtypes
        figures = measure(str(model), arguments.measure, dtype, arguments.num_prompts)
        arguments.report.write_text(json.dumps(figures))
        return
    table = []
    heads = (f"{f'{name} {what}':>22}" for what in ("largest", "mean") for name in MEASURED)
    print(f"{'checkpoint':<12}{'dtype':<10}{''.join(heads)}")
    for checkpoint in arguments.checkpoints:
        for dtype in arguments.dtypes:
            row: dict[str, Any] = {"checkpoint": checkpoint.name, "dtype": dtype}
            row |= {name: _in_a_process(checkpoint, name, dtype, arguments.num_prompts) for name in MEASURED}
            table.append(row)
            both = [row[name] and row[name][what] for what in ("largest", "mean") for name in MEASURED]
            cells = (f"{'-' if it is None else format(it, '.2e'):>22}" for it in both)
            print(f"{checkpoint.name:<12}{dtype:<10}{''.join(cells)}", flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(table, indent=1))


def _in_a_process(checkpoint: Path, impl: str, dtype: str, num_prompts: int) -> dict[str, float] | None:
    """None: native does not run it here."""
    path = os.pathsep.join([str(VLLM_STAND_INS), os.environ.get("PYTHONPATH", "")])
    with tempfile.NamedTemporaryFile(suffix=".json") as report:
        command = [sys.executable, "-m", "benchmarks.parity", "--measure", impl, "--report", report.name]
        command += ["--checkpoints", str(checkpoint), "--dtypes", dtype, "--num-prompts", str(num_prompts)]
        environ = {**os.environ, "PYTHONPATH": path}
        process = subprocess.run(command, capture_output=True, text=True, check=False, env=environ)
        if process.returncode and impl == "native":
            said = [line for line in (process.stdout + process.stderr).splitlines() if "Error: " in line]
            print(f"{checkpoint.name} in {dtype}: native fails with {said[0] if said else 'no error'}", file=sys.stderr)
            return None
        if process.returncode:
            sys.stderr.write(process.stdout + process.stderr)
            raise SystemExit(f"the {impl} engine failed")
        figures: dict[str, float] = json.loads(Path(report.name).read_text())
    return figures


if __name__ == "__main__":
    main()
