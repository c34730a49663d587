"""Native and atom engines on a GPU in turns, one at a time: each round starts both, in alternating order.

An engine takes most of the GPU's memory. Several rounds show how much figures vary; the first has empty compile caches
("cold"), which later rounds reuse. Alternatively both engines run side by side with a share of the memory each, and
alternate run by run (`benchmarks._together`). Weights are random. A benchmark says how an engine is started; its main
is `compare`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from atom_core.models.read_config import read_model_config
from atom_plugin.bench.models import read_config
from benchmarks import IMPLEMENTATIONS
from benchmarks._figures import Rounds, as_json, markdown, plot, require_matplotlib, summarise
from benchmarks._ran_with import lines_of, versions
from benchmarks._runs import Shape, Started, prompts_of, run_shapes, serve_command, warm_up, with_caches
from benchmarks._together import Together, serve_turns

#: Ways to have weights without a checkpoint.
RANDOM = ("dummy", "random")


def engine_options(parser: argparse.ArgumentParser) -> None:
    """The model and its options, the same for native and atom."""
    parser.add_argument("--model", default="qwen3-0.6b", help="a name, a config.json or a checkpoint's folder")
    parser.add_argument("--layers", type=int, help="keep so many layers")
    parser.add_argument(
        "--load-format",
        default="dummy",
        help="dummy: each engine's own random weights; random: one checkpoint for all, written where TMPDIR says",
    )
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--quantization")
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--max-model-len", type=int, default=4096)
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.85)
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument(
        "--extra-engine-json", type=json.loads, default={}, help="JSON: more arguments of the engine, for both"
    )
    parser.add_argument("--rounds", type=count, default=3, help="engines of each kind")
    parser.add_argument(
        "--together",
        action="store_true",
        help="an engine of each kind at once, in turns run by run; each needs room: --gpu-memory-utilization below 0.5",
    )
    parser.add_argument("--json", type=Path, help="write all figures there; the plot goes beside it")
    parser.add_argument("--no-plot", action="store_true")


@contextmanager
def model_folder(arguments: argparse.Namespace) -> Iterator[str]:
    """The engines' model folder: a checkpoint, a random checkpoint, or one with only a configuration."""
    if arguments.load_format not in RANDOM:
        yield arguments.model
        return
    with tempfile.TemporaryDirectory() as folder:
        if arguments.load_format == "random":
            # In a process of its own, which leaves nothing in the GPU's memory.
            layers = [] if arguments.layers is None else ["--layers", str(arguments.layers)]
            command = [sys.executable, "-m", "benchmarks.random_checkpoint", arguments.model, folder, *layers]
            subprocess.run(command, check=True)
        else:
            (Path(folder) / "config.json").write_text(json.dumps(read_config(arguments.model, arguments.layers)))
        yield folder


def count(text: str) -> int:
    """A number from 1 on."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 on")
    return int(text)


def load_format(arguments: argparse.Namespace) -> str:
    """The options of the engines."""
    return "auto" if arguments.load_format == "random" else str(arguments.load_format)


def serve(arguments: argparse.Namespace, start: Callable[[argparse.Namespace], Started]) -> None:
    """Serve as one engine: start it, run every shape, and write the figures to the file `arguments.result`."""
    engine = start(arguments)
    found: dict[str, Any] = {"start": time.time() - arguments.begun, "cache_tokens": engine.cache_tokens}
    prompts = {shape: prompts_of(shape, arguments.model) for shape in arguments.shapes}
    warm_up(engine, prompts[arguments.shapes[0]], arguments.output_len)
    ran = run_shapes(engine, prompts, arguments.output_len, arguments.repetitions)
    found["shapes"] = {str(shape): times for shape, times in ran.items()}
    arguments.result.write_text(json.dumps(found))
    engine.stop()


class Turns:
    """All rounds of a benchmark, with one engine process at a time."""

    def __init__(self, module: str, arguments: argparse.Namespace, model: str) -> None:
        self.module, self.arguments, self.model = module, arguments, model
        self.lines = lines_of(module)
        self.folder = tempfile.TemporaryDirectory()
        self.engines: list[dict[str, Any]] = []

    def run(self) -> Rounds:
        """Every figure of every round."""
        names = list(IMPLEMENTATIONS)
        self._warm_files()
        rounds: dict[str, dict[str, list[float]]] = {}
        for index in range(self.arguments.rounds):
            for name in names if index % 2 == 0 else names[::-1]:
                found = self._engine(name)
                self.engines.append({"round": index, "implementation": name, **found})
                # Keep the figures if a later engine fails.
                print(f"{name} " + json.dumps(found), flush=True)
                new = _figures(found, cold=index == 0)
                for figure, values in new.items():
                    rounds.setdefault(figure, {}).setdefault(name, []).extend(values)
            last = {it: {name: rounds[it][name][-len(values) :] for name in names} for it, values in new.items()}
            print(
                f"round {index}: " + "; ".join(f"{row.figure} x{row.ratio:.2f}" for row in summarise(last)), flush=True
            )
        return rounds

    def details(self) -> dict[str, Any]:
        """What a file has beside the figures: all that each engine found, and the kernels that it ran with."""
        return {"engines": self.engines}

    def native_kernels(self) -> list[str]:
        """What native's log says of its attention."""
        return next((it["ran_with"]["attention"] for it in self.engines if it["implementation"] == "native"), [])

    def _engine(self, name: str) -> dict[str, Any]:
        folder = Path(self.folder.name)
        result, log = folder / "result.json", folder / "log"
        result.unlink(missing_ok=True)
        command = serve_command(self.module, self.model, name)
        command += ["--result", str(result), "--begun", str(time.time())]
        with log.open("w") as file:
            code = subprocess.run(
                command, env=with_caches(folder / name), stdout=file, stderr=file, check=False
            ).returncode
        if not result.exists():
            sys.stderr.write(log.read_text(errors="replace")[-20000:])
            raise SystemExit(f"the {name} engine failed with exit code {code}")
        found: dict[str, Any] = json.loads(result.read_text())
        return {**found, "ran_with": self.lines.read(log.read_text(errors="replace"))}

    def _warm_files(self) -> None:
        """Read the framework's files once, or the first engine alone would wait for the disk."""
        framework = self.module.partition("_")[0]
        subprocess.run([sys.executable, "-c", f"import {framework}"], check=False, capture_output=True)


def _figures(found: Mapping[str, Any], *, cold: bool) -> dict[str, list[float]]:
    """One engine's figures by name: milliseconds of each repetition, and seconds."""
    figures = {}
    for shape, times in found["shapes"].items():
        for name in ("tpot", "ttft"):
            figures[f"{shape} {name}, ms"] = [seconds * 1e3 for seconds in times[name]]
    figures[f"start, {'cold' if cold else 'warm'}, s"] = [found["start"]]
    figures["cache tokens"] = [found["cache_tokens"]]
    return figures


def floors(arguments: argparse.Namespace, bandwidth: float) -> dict[str, float | None]:
    """The least time a token of each shape, in ms, half of the answer in the cache; None: an unknown architecture."""
    import torch

    from atom_core.quant import read_quantization
    from atom_plugin.bench.floor import step_traffic
    from atom_plugin.bench.step import torch_dtype

    dtype = torch_dtype(arguments.dtype)
    cache_dtype = torch.float8_e4m3fn if "fp8" in arguments.kv_cache_dtype else dtype
    hf = read_config(arguments.model, arguments.layers)
    found: dict[str, float | None] = {}
    for shape in arguments.shapes:
        context = shape.input_len + arguments.output_len // 2
        try:
            quant = read_quantization(hf, arguments.quantization)
            traffic = step_traffic(read_model_config(hf), shape.batch, context, dtype, cache_dtype, quant)
        except ValueError:
            found[f"{shape} tpot, ms"] = None
            continue
        found[f"{shape} tpot, ms"] = traffic.seconds(bandwidth * arguments.tensor_parallel_size) * 1e3
    return found


def measure_ceiling() -> dict[str, Any]:
    """The GPU's name and bandwidth, from a process of its own that leaves nothing in its memory."""
    code = (
        "import json; from atom_plugin.bench.device import measure_ceiling, require_gpu; "
        "it = measure_ceiling(require_gpu()); "
        "print(json.dumps({'device': it.device, 'copy': it.copy, 'read': it.read, 'bandwidth': it.bandwidth}))"
    )
    finished = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    if finished.returncode:
        raise SystemExit(finished.stderr.strip().splitlines()[-1])
    found: dict[str, Any] = json.loads(finished.stdout.splitlines()[-1])
    return found


def compare(
    module: str,
    description: str | None,
    start: Callable[[argparse.Namespace], Started],
    more_options: Callable[[argparse.ArgumentParser], None] = lambda parser: None,
    arguments: Sequence[str] | None = None,
) -> None:
    """The command line: measure both in turns, or be one engine.

    Args:
        module: the benchmark's name in this folder.
        description: what `--help` says.
        start: starts the engine that `arguments.serve` names.
        more_options: adds the benchmark's own.
        arguments: None: the process's.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    engine_options(parser)
    more_options(parser)
    default = [Shape(1, 128), Shape(8, 128), Shape(64, 512), Shape(256, 512)]
    parser.add_argument("--shapes", type=Shape.read, nargs="+", default=default, help="requests x tokens, as 8x128")
    parser.add_argument("--output-len", type=int, default=256)
    parser.add_argument(
        "--temperature",
        type=float,
        default=0.0,
        help="of sampling; 0 is greedy, which repeats few tokens where weights are random",
    )
    parser.add_argument("--repetitions", type=count, default=3, help="runs of each shape in an engine")
    parser.add_argument("--serve", choices=list(IMPLEMENTATIONS), help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--replies", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--begun", type=float, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.serve and given.together:
        serve_turns(given, start)
        return
    if given.serve:
        serve(given, start)
        return
    if given.output_len < 2:
        parser.error("--output-len must be 2 at least: the first token counts as prefill")
    if not given.no_plot and given.json:
        require_matplotlib()
    ceiling = measure_ceiling()
    print(f"{ceiling['device']}: {ceiling['bandwidth'] / 1e12:.2f} TB/s, measured here", flush=True)
    with model_folder(given) as model:
        turns = Together(module, given, model) if given.together else Turns(module, given, model)
        rows = summarise(turns.run(), floors(given, ceiling["bandwidth"]))
    print(markdown(rows), end="")
    if not turns.native_kernels():
        print(
            "native's log names no kernel of its attention: say by what it ran, or it is no baseline", file=sys.stderr
        )
    if given.json:
        # Where files go is not what was measured.
        unasked = ("serve", "result", "replies", "begun", "json", "no_plot")
        asked = {name: str(value) for name, value in vars(given).items() if name not in unasked}
        found = {"asked": asked, "versions": versions(), "ceiling": ceiling, "rows": as_json(rows), **turns.details()}
        given.json.write_text(json.dumps(found, indent=1) + "\n")
        if not given.no_plot:
            quantized = f", {given.quantization}" if given.quantization else ""
            turned = f"{given.repetitions} turns" if given.together else f"{given.rounds} rounds"
            title = f"{module.partition('_')[0]}: {given.model}{quantized}, {ceiling['device']}, {turned}"
            times = [row for row in rows if row.figure.endswith(", ms")]
            plot(times, given.json.with_suffix(".png"), title)
