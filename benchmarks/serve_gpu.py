"""vLLM's own `vllm bench serve` against a live server on a GPU, native and atom in turns with the same flags.

    python -m benchmarks.serve_gpu --model qwen3-8b --json serve.json
    python -m benchmarks.serve_gpu --model qwen3-8b --concurrency 1 64 --request-rates 4 16

Weights are random, and so are prompts (its "random" dataset). Random models answer with any token of their vocabulary,
and a client sees only tokens that have a text, so these models get a tokenizer in which each token is a word. A load is
a number of requests at once, or a rate at which they arrive.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from benchmarks import IMPLEMENTATIONS
from benchmarks._figures import as_json, markdown, plot, require_matplotlib, summarise
from benchmarks._gpu import RANDOM, engine_options, load_format, model_folder
from benchmarks._tokenizer import write_tokenizer
from tests.integration.server import VllmServer

#: What is taken from `vllm bench serve`, and what it is called in the table.
FIGURES = {
    "median_tpot_ms": "tpot, ms",
    "p99_tpot_ms": "p99 tpot, ms",
    "median_ttft_ms": "ttft, ms",
    "p99_ttft_ms": "p99 ttft, ms",
    "output_throughput": "output tokens a second",
}
VLLM = (sys.executable, "-m", "vllm.entrypoints.cli.main")


@dataclass(frozen=True)
class Load:
    """How requests come: so many at once, or so many a second."""

    concurrency: int | None = None
    rate: float | None = None

    def __str__(self) -> str:
        return f"{self.concurrency} at once" if self.rate is None else f"{self.rate:g} a second"

    def num_prompts(self, each: int, seconds: float) -> int:
        """Enough that starting and ending matter little."""
        return max(16, each * (self.concurrency or 1)) if self.rate is None else max(16, round(self.rate * seconds))

    def flags(self) -> list[str]:
        """Of `vllm bench serve`."""
        if self.rate is None:
            return ["--request-rate", "inf", "--max-concurrency", str(self.concurrency)]
        return ["--request-rate", str(self.rate)]


class GpuServer(VllmServer):
    """`vllm serve` on a GPU."""

    defaults: ClassVar[Mapping[str, str]] = {}

    @property
    def command(self) -> list[str]:
        """See :class:`tests.integration.server.Server`."""
        return [*VLLM, "serve", self.model, "--host", "127.0.0.1", "--port", str(self.port), *self.flags]


def server_flags(name: str, arguments: argparse.Namespace) -> list[str]:
    """Of `vllm serve`: alike for both but for the one that this is about."""
    flags = ["--model-impl", IMPLEMENTATIONS[name], "--load-format", load_format(arguments)]
    flags += ["--dtype", arguments.dtype, "--max-model-len", str(arguments.max_model_len)]
    flags += ["--max-num-seqs", str(arguments.max_num_seqs)]
    flags += ["--gpu-memory-utilization", str(arguments.gpu_memory_utilization)]
    flags += ["--tensor-parallel-size", str(arguments.tensor_parallel_size)]
    flags += ["--kv-cache-dtype", arguments.kv_cache_dtype, "--no-enable-prefix-caching"]
    if arguments.quantization:
        flags += ["--quantization", arguments.quantization]
    for option, value in arguments.extra_engine_json.items():
        flag = f"--{option.replace('_', '-')}"
        if isinstance(value, bool):
            flags.append(flag if value else flag.replace("--", "--no-", 1))
        else:
            flags += [flag, value if isinstance(value, str) else json.dumps(value)]
    return flags


def ask(server: VllmServer, load: Load, arguments: argparse.Namespace) -> dict[str, Any]:
    """The result of `vllm bench serve` under one load."""
    with tempfile.TemporaryDirectory() as folder:
        command = [*VLLM, "bench", "serve", "--backend", "vllm", "--base-url", server.url, "--model", server.model]
        command += ["--dataset-name", "random", "--ignore-eos", "--seed", "0"]
        command += ["--random-input-len", str(arguments.input_len), "--random-output-len", str(arguments.output_len)]
        command += ["--num-prompts", str(load.num_prompts(arguments.prompts_each, arguments.seconds)), *load.flags()]
        command += ["--num-warmups", "4", "--percentile-metrics", "ttft,tpot,itl,e2el", "--disable-tqdm"]
        command += ["--save-result", "--result-dir", folder, "--result-filename", "result.json"]
        finished = subprocess.run(command, check=False, capture_output=True, text=True)
        result = Path(folder) / "result.json"
        if finished.returncode or not result.exists():
            sys.stderr.write(finished.stdout[-8000:] + finished.stderr[-8000:])
            raise SystemExit("`vllm bench serve` failed")
        found: dict[str, Any] = json.loads(result.read_text())
    if found.get("failed"):
        raise SystemExit(f"{found['failed']} requests failed under {load}")
    return found


def main() -> None:
    """A server of each kind a round, every load against it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    engine_options(parser)
    parser.set_defaults(rounds=1)
    parser.add_argument("--input-len", type=int, default=512)
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--concurrency", type=int, nargs="*", default=[1, 8, 64, 256])
    parser.add_argument("--request-rates", type=float, nargs="*", default=[4.0, 16.0])
    parser.add_argument("--prompts-each", type=int, default=8, help="prompts for each of the requests at once")
    parser.add_argument("--seconds", type=float, default=20.0, help="how long requests arrive at a rate")
    parser.add_argument("--deadline", type=float, default=900.0, help="seconds in which a server must be ready")
    arguments = parser.parse_args()
    if arguments.json and not arguments.no_plot:
        require_matplotlib()
    loads = [Load(concurrency=count) for count in arguments.concurrency]
    loads += [Load(rate=rate) for rate in arguments.request_rates]
    names = list(IMPLEMENTATIONS)
    rounds: dict[str, dict[str, list[float]]] = {}
    results = []
    with model_folder(arguments) as model:
        if arguments.load_format in RANDOM:
            write_tokenizer(Path(model))
        for index in range(arguments.rounds):
            for name in names if index % 2 == 0 else names[::-1]:
                with GpuServer(model, *server_flags(name, arguments), deadline=arguments.deadline) as server:
                    assert isinstance(server, VllmServer)
                    for load in loads:
                        found = ask(server, load, arguments)
                        results.append({"round": index, "implementation": name, "load": str(load), **found})
                        for key, label in FIGURES.items():
                            rounds.setdefault(f"{load}: {label}", {}).setdefault(name, []).append(found[key])
                        print(
                            f"{name:<8}{load!s:<16}" + "  ".join(f"{FIGURES[key]} {found[key]:.2f}" for key in FIGURES)
                        )
    rows = summarise(rounds)
    print(markdown(rows), end="")
    if arguments.json:
        arguments.json.write_text(json.dumps({"rows": as_json(rows), "results": results}, indent=1) + "\n")
        if not arguments.no_plot:
            times = [row for row in rows if row.figure.endswith((": tpot, ms", ": ttft, ms"))]
            plot(times, arguments.json.with_suffix(".png"), f"vllm bench serve: {arguments.model}")


if __name__ == "__main__":
    main()
