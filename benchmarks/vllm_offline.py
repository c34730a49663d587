"""Native vLLM and atom side by side, offline, on one machine in one run.

    python -m benchmarks.vllm_offline                                   # a 190M random Qwen3, as on a CPU
    python -m benchmarks.vllm_offline --model DIR --batches 1 8 64      # any local checkpoint

Native and atom alternate, each engine in a process of its own; a figure is the median over the rounds, and only ratios
within one run mean anything. For each batch size: seconds to the first token (prefill), seconds a token after that
(decode). For each engine: seconds to start, and the largest resident memory of its processes.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from benchmarks import IMPLEMENTATIONS

#: A decoder of 190M parameters: large enough that products dominate, small enough for two cores.
RANDOM_QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
}


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """One engine, in this process: its figures."""
    from vllm import LLM, SamplingParams

    memory = ResidentMemory()
    begin = time.perf_counter()
    llm = LLM(
        arguments.model,
        model_impl=IMPLEMENTATIONS[arguments.measure],
        load_format=arguments.load_format,
        skip_tokenizer_init=True,
        dtype=arguments.dtype,
        max_model_len=arguments.max_model_len,
        max_num_seqs=max(arguments.batches),
        enable_prefix_caching=False,
        enforce_eager=arguments.enforce_eager,
        disable_log_stats=True,
    )
    figures: dict[str, Any] = {"start": time.perf_counter() - begin, "batches": {}}
    generator = random.Random(0)
    for batch in arguments.batches:
        prompts = [
            {"prompt_token_ids": [generator.randrange(100, 30000) for _ in range(arguments.input_len)]}
            for _ in range(batch)
        ]

        def run(count: int, prompts: list[Any] = prompts) -> float:
            sampling = SamplingParams(
                temperature=0.0, max_tokens=count, min_tokens=count, ignore_eos=True, detokenize=False
            )
            start = time.perf_counter()
            llm.generate(prompts, sampling, use_tqdm=False)
            return time.perf_counter() - start

        run(4)
        first = min(run(1) for _ in range(arguments.repetitions))
        whole = min(run(arguments.output_len) for _ in range(arguments.repetitions))
        figures["batches"][batch] = {"prefill": first, "decode": (whole - first) / (arguments.output_len - 1)}
    figures["memory"] = memory.stop()
    return figures


class ResidentMemory:
    """The largest proportional memory, in bytes, that this process and its descendants have had together."""

    def __init__(self) -> None:
        self.largest = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def stop(self) -> int:
        """The figure."""
        self._stop.set()
        self._thread.join()
        return self.largest

    def _watch(self) -> None:
        while not self._stop.wait(0.2):
            self.largest = max(self.largest, sum(map(_memory_of, _descendants(os.getpid()))))


def _descendants(root: int) -> list[int]:
    parents: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
        except (FileNotFoundError, ProcessLookupError):
            continue
    family = [root]
    for process in family:
        family.extend(child for child, parent in parents.items() if parent == process)
    return family


def _memory_of(process: int) -> int:
    """Proportional set size: pages shared between processes are counted once in all."""
    try:
        lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))


def run_rounds(arguments: argparse.Namespace) -> dict[str, list[dict[str, Any]]]:
    """Every engine once a round, in alternating order."""
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in IMPLEMENTATIONS}
    for index in range(arguments.rounds + arguments.warm_rounds):
        order = list(IMPLEMENTATIONS) if index % 2 == 0 else list(reversed(IMPLEMENTATIONS))
        for name in order:
            command = [sys.executable, "-m", "benchmarks.vllm_offline", *sys.argv[1:]]
            command += ["--model", arguments.model, "--measure", name]
            if arguments.model_is_random:
                command += ["--load-format", "dummy"]
            with tempfile.NamedTemporaryFile(suffix=".json") as report:
                process = subprocess.run([*command, "--report", report.name], capture_output=True, check=False)
                if process.returncode:
                    sys.stderr.write(process.stdout.decode() + process.stderr.decode())
                    raise SystemExit(f"the {name} engine failed")
                figures = json.loads(Path(report.name).read_text())
            print(f"round {index} {name}: start {figures['start']:.1f} s, {figures['batches']}", flush=True)
            if index >= arguments.warm_rounds:
                results[name].append(figures)
    return results


def summarise(results: dict[str, list[dict[str, Any]]], input_len: int) -> list[dict[str, Any]]:
    """Medians and ratios; a ratio above 1 means that atom is faster, or smaller."""

    def median(name: str, *keys: str) -> float:
        values = []
        for figures in results[name]:
            value: Any = figures
            for key in keys:
                value = value[key]
            values.append(value)
        return statistics.median(values)

    rows = [("start, s", ("start",)), ("memory, bytes", ("memory",))]
    for batch in results["native"][0]["batches"]:
        rows.append((f"batch {batch}: time to first token of {input_len}, s", ("batches", batch, "prefill")))
        rows.append((f"batch {batch}: time a token, s", ("batches", batch, "decode")))
    table = []
    for label, keys in rows:
        native, atom = median("native", *keys), median("atom", *keys)
        table.append({"figure": label, "native": native, "atom": atom, "ratio": native / atom})
    return table


def main() -> None:
    """Parse the command line; measure one engine, or compare both."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a local checkpoint; left out: a random Qwen3 of 190M parameters")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--max-model-len", type=int, default=1024)
    parser.add_argument("--enforce-eager", action="store_true")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--input-len", type=int, default=256)
    parser.add_argument("--output-len", type=int, default=33)
    parser.add_argument("--repetitions", type=int, default=3, help="runs of each shape; the fastest counts")
    parser.add_argument("--rounds", type=int, default=3, help="engines of each kind; the median counts")
    parser.add_argument("--warm-rounds", type=int, default=1, help="rounds before, to fill compile caches")
    parser.add_argument("--json", type=Path, help="write all figures there")
    parser.add_argument("--measure", choices=list(IMPLEMENTATIONS), help=argparse.SUPPRESS)
    parser.add_argument("--report", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        arguments.report.write_text(json.dumps(measure(arguments)))
        return
    arguments.model_is_random = arguments.model is None
    with tempfile.TemporaryDirectory() as directory:
        if arguments.model_is_random:
            (Path(directory) / "config.json").write_text(json.dumps(RANDOM_QWEN3))
            arguments.model = directory
        results = run_rounds(arguments)
    table = summarise(results, arguments.input_len)
    width = max(len(row["figure"]) for row in table)
    for row in table:
        print(f"{row['figure']:<{width}}  native {row['native']:12.4g}  atom {row['atom']:12.4g}  x{row['ratio']:.2f}")
    if arguments.json:
        arguments.json.write_text(json.dumps({"engines": results, "table": table}, indent=1))


if __name__ == "__main__":
    main()
