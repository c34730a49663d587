"""Time each op's calls of a model in captured graphs, next to torch's and vLLM's kernels and the GPU's limits.

The calls of a graph cycle through buffers that together exceed the GPU's cache, as a model's layers do; a row says so
if they do not. A time is given only if the values agree with torch's, or with float32 where torch rounds intermediate
values. With `--grid` decoding attention has shapes of its own: see :mod:`atom_plugin.bench.grid`. Without the command
line's packages: `python -m atom_plugin.bench.kernels --op linear --model qwen3-8b`.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from atom_core.kernels.select import Target
from atom_core.models.read_config import read_model_config
from atom_plugin.bench import grid_run, tune
from atom_plugin.bench.agreement import TOLERANCE, distance
from atom_plugin.bench.cases import CASES as PLAIN_CASES
from atom_plugin.bench.cases import Bench, Case, Contender
from atom_plugin.bench.delta_cases import DELTA_CASES
from atom_plugin.bench.device import (
    Limits,
    Timing,
    cache_and_memory,
    capture,
    measure,
    measure_ceiling,
    measure_products,
    num_copies,
    require_gpu,
)
from atom_plugin.bench.expert_cases import EXPERT_CASES
from atom_plugin.bench.fp8_cases import FP8_CASES
from atom_plugin.bench.fused_cases import FUSED_CASES
from atom_plugin.bench.grid import AXES, DEFAULT_OPS, GridOptions, axes_of, has_axis
from atom_plugin.bench.mla_cases import MLA_CASES
from atom_plugin.bench.models import read_config
from atom_plugin.bench.step import torch_dtype
from atom_plugin.bench.vllm_kernels import Unavailable
from atom_plugin.common.kernels import chosen_kernels
from atom_plugin.common.settings import load_settings

#: The cases of a model by op.
CASES = {**PLAIN_CASES, **FUSED_CASES, **FP8_CASES, **MLA_CASES, **DELTA_CASES, **EXPERT_CASES}
DEFAULT_MODELS = ("qwen3-0.6b", "qwen3-8b")
#: Contenders that need vLLM.
_OF_VLLM = ("vllm", "vllm, untuned", "FlashAttention 3", "FlashMLA")
_MIN_CALLS = 16


@dataclass(frozen=True)
class KernelOptions:
    """What is measured."""

    models: tuple[str, ...] = DEFAULT_MODELS
    ops: tuple[str, ...] = ()
    """Empty: all."""
    against_vllm: bool = False
    dtype: str = "bfloat16"
    repetitions: int = 10
    rows: tuple[int, ...] = ()
    """Numbers of input rows to tune for; empty: :data:`atom_plugin.bench.tune.ROWS`."""

    def check(self) -> None:
        """Raise a ValueError for an unsupported option."""
        if self.repetitions < 1:
            raise ValueError(f"--repetitions {self.repetitions}: a positive number is needed.")
        for op in self.ops:
            if op not in CASES:
                raise ValueError(f"--op {op!r}: supported: {', '.join(CASES)}.")
        for rows in self.rows:
            if rows not in tune.ROWS:
                raise ValueError(f"--rows {rows}: supported: {', '.join(map(str, tune.ROWS))}.")
        torch_dtype(self.dtype)
        for model in self.models:
            read_model_config(read_config(model))


@dataclass(frozen=True)
class Row:
    """One contender's time for one case; None if it could not run, with the reason in ``note``."""

    model: str
    op: str
    case: str
    contender: str
    num_bytes: int
    num_operations: int
    floor_seconds: float
    memory_bound: bool
    timing: Timing | None
    note: str = ""

    @property
    def share(self) -> float | None:
        """The share of the limit that was reached."""
        return None if self.timing is None else self.floor_seconds / self.timing.median

    def rate(self) -> str:
        """The bandwidth or operations per second reached, whichever bounds the call."""
        if self.timing is None:
            return ""
        if self.memory_bound:
            return f"{self.num_bytes / self.timing.median / 1e9:.0f} GB/s"
        return f"{self.num_operations / self.timing.median / 1e12:.1f} TFLOP/s"

    def as_json(self) -> dict[str, Any]:
        """All figures, in the units that the keys name."""
        timing = self.timing
        return {
            "model": self.model,
            "op": self.op,
            "case": self.case,
            "contender": self.contender,
            "microseconds": None if timing is None else timing.median * 1e6,
            "least_microseconds": None if timing is None else timing.least * 1e6,
            "most_microseconds": None if timing is None else timing.most * 1e6,
            "floor_microseconds": self.floor_seconds * 1e6,
            "share_of_ceiling": self.share,
            "limited_by": "memory" if self.memory_bound else "products",
            "num_bytes": self.num_bytes,
            "num_operations": self.num_operations,
            "note": self.note,
        }

    def line(self) -> str:
        """The row as printed text."""
        head = f"{self.model:<14}{self.op:<20}{self.case:<44}{self.contender:<18}"
        if self.timing is None or self.share is None:
            return f"{head}{'-':>10}  {self.note}"
        note = f"  {self.note}" if self.note else ""
        return (
            f"{head}{self.timing.median * 1e6:>10.2f} us{self.rate():>16}"
            f"{self.floor_seconds * 1e6:>10.2f} us{self.share:>7.0%}{note}"
        )


HEADING = f"{'model':<14}{'op':<20}{'case':<44}{'by':<18}{'time':>13}{'reached':>16}{'floor':>13}{'share':>7}"


@torch.inference_mode()
def measure_kernels(options: KernelOptions, say: Callable[[str], None]) -> tuple[Limits, list[Row]]:
    """Measure every case; `say` gets each line as soon as it is measured.

    Raises:
        ValueError: no GPU, or an option that is not supported.
    """
    options.check()
    device, dtype = require_gpu(), torch_dtype(options.dtype)
    limits = Limits(measure_ceiling(device), measure_products(device, dtype))
    say(f"{limits.memory.device}, torch {torch.__version__}, {options.dtype}")
    say(
        f"ceiling, measured here: copying {limits.memory.copy / 1e12:.2f} TB/s, reading "
        f"{limits.memory.read / 1e12:.2f} TB/s, products {limits.products / 1e12:.0f} TFLOP/s"
    )
    say(HEADING)
    bench = Bench(device, dtype, chosen_kernels(Target.of(device), load_settings()))
    rows = []
    for model in options.models:
        config = read_model_config(read_config(model))
        for op in options.ops or CASES:
            for case in CASES[op](config, dtype.itemsize):
                for row in _rows(model, case, bench, limits, options):
                    say(row.line())
                    rows.append(row)
    return limits, rows


def _rows(model: str, case: Case, bench: Bench, limits: Limits, options: KernelOptions) -> Iterator[Row]:
    floor, memory_bound = limits.least_seconds(case, case.operand_bits)
    copies = num_copies(case.num_bytes, *cache_and_memory(bench.device))
    cached = copies * case.num_bytes < 2 * cache_and_memory(bench.device)[0]
    expected = [contender(bench, 1)(0).float().clone() for contender in case.exact]
    tolerance = TOLERANCE[bench.dtype]
    if case.unrounded is not None:
        tolerance = max(tolerance, distance(case.unrounded(bench, 1)(0).float(), expected[0]))
    torch.cuda.empty_cache()
    # torch comes first: without a float32 reference the others are compared with it.
    names = sorted(case.contenders, key=lambda name: name != "torch")
    for name in names:
        if name in _OF_VLLM and not options.against_vllm:
            continue
        timing, note = None, ""
        try:
            timing, found = _measure_one(case.contenders[name], bench, copies, options.repetitions)
        except Unavailable as reason:
            note = str(reason)
        else:
            expected = expected or [found]
            apart = min(distance(found, values) for values in expected)
            if apart > tolerance:
                note = f"its values are {apart:.1e} from {'float32' if case.exact else names[0]}'s"
                # vLLM's users run its kernels as they are. FlashInfer's linear attention rounds more than ours.
                if name != "torch" and not (name in _OF_VLLM and apart <= 2 * tolerance):
                    timing, note = None, f"{note}: no time is given"
            elif cached:
                note = "fits the GPU's cache"
        yield Row(
            model, case.op, case.name, name, case.num_bytes, case.num_operations, floor, memory_bound, timing, note
        )


def _measure_one(contender: Contender, bench: Bench, copies: int, repetitions: int) -> tuple[Timing, torch.Tensor]:
    run = contender(bench, copies)
    found = run(0).float().clone()
    calls = copies * math.ceil(_MIN_CALLS / copies)

    def all_calls() -> None:
        for index in range(calls):
            run(index % copies)

    graph = capture(all_calls)
    timing = measure(graph.replay, repetitions, warm_seconds=0.1)
    del graph
    torch.cuda.empty_cache()
    return Timing(timing.median / calls, timing.least / calls, timing.most / calls), found


def as_json(limits: Limits, rows: Sequence[Row]) -> dict[str, Any]:
    """All limits and rows."""
    return {
        **asdict(limits.memory),
        "torch": torch.__version__,
        "datasheet_bytes_a_second": limits.memory.datasheet,
        "products_a_second": limits.products,
        "rows": [row.as_json() for row in rows],
    }


@dataclass(frozen=True)
class KernelCommand:
    """What the command line is given; the options of one mode, of which another has no use, are refused."""

    models: tuple[str, ...] = ()
    ops: tuple[str, ...] = ()
    against_vllm: bool = False
    dtype: str = KernelOptions.dtype
    repetitions: int = KernelOptions.repetitions
    rows: tuple[int, ...] = ()
    path: Path | None = None
    tune: bool = False
    output: Path | None = None
    grid: bool = False
    axes: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    all_shapes: bool = False
    max_model_len: int | None = None

    def check(self) -> None:
        """Raise a ValueError for options that do not go together."""
        if self.tune and (self.path is not None or self.against_vllm):
            raise ValueError(
                "--tune writes its own file, and compares with the default alone: no --json, no --against."
            )
        if self.tune and self.ops not in ((), ("linear",)):
            raise ValueError(f"--tune has tiles to choose for linear only, not for --op {', '.join(self.ops)}.")
        if not self.tune and self.output is not None:
            raise ValueError("--output is where --tune writes; without it, use --json.")
        if not self.tune and self.rows:
            raise ValueError("--rows is for --tune; without it all of an op's cases are measured.")
        if self.grid and (self.tune or self.models):
            raise ValueError("--grid has shapes of its own, and tunes nothing: no --model, no --tune.")
        if not self.grid:
            given = [option for option, name in AXES.items() if name in self.axes]
            given += ["--all-shapes"] * self.all_shapes + ["--max-model-len"] * (self.max_model_len is not None)
            if given:
                raise ValueError(f"{given[0]} is for --grid; without it a --model has the shapes.")
            return
        ops = self.ops or DEFAULT_OPS
        for option, name in AXES.items():
            if name in self.axes and not any(has_axis(op, name) for op in ops):
                raise ValueError(f"{option} is an axis that {', '.join(ops)} does not have.")

    def grid_options(self) -> GridOptions:
        """Those of --grid."""
        return GridOptions(
            ops=self.ops or DEFAULT_OPS,
            axes=axes_of(self.axes, self.all_shapes),
            dtype=self.dtype,
            repetitions=self.repetitions,
            max_model_len=GridOptions.max_model_len if self.max_model_len is None else self.max_model_len,
        )

    def options(self) -> KernelOptions:
        """Those of the other modes."""
        return KernelOptions(
            models=self.models or DEFAULT_MODELS,
            ops=self.ops,
            against_vllm=self.against_vllm,
            dtype=self.dtype,
            repetitions=self.repetitions,
            rows=self.rows,
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """`python -m atom_plugin.bench.kernels`: the same options as `atom-plugin bench kernels`."""
    parser = argparse.ArgumentParser(prog="python -m atom_plugin.bench.kernels", description="See the module's text.")
    parser.add_argument("--op", action="append", default=[], help=f"one of {', '.join(CASES)}; may be repeated")
    parser.add_argument("--model", action="append", default=[], help="may be repeated")
    parser.add_argument("--dtype", default=KernelOptions.dtype)
    parser.add_argument("--repetitions", type=int, default=KernelOptions.repetitions)
    parser.add_argument("--against", choices=["vllm"])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--rows", type=int, action="append", default=[], help="with --tune; may be repeated")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--grid", action="store_true", help="instead decoding attention, beside vLLM's libraries")
    for option, name in AXES.items():
        kind = str if name == "cache_dtype" else int
        parser.add_argument(option, type=kind, action="append", default=[], help="with --grid; may be repeated")
    parser.add_argument("--all-shapes", action="store_true", help="with --grid")
    parser.add_argument("--max-model-len", type=int, help="with --grid")
    given = parser.parse_args(arguments)
    command = KernelCommand(
        models=tuple(given.model),
        ops=tuple(given.op),
        against_vllm=given.against == "vllm",
        dtype=given.dtype,
        repetitions=given.repetitions,
        rows=tuple(given.rows),
        path=given.json,
        tune=given.tune,
        output=given.output,
        grid=given.grid,
        axes={name: tuple(values) for name in AXES.values() if (values := getattr(given, name))},
        all_shapes=given.all_shapes,
        max_model_len=given.max_model_len,
    )
    try:
        execute(command, print_line)
    except ValueError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


def execute(command: KernelCommand, say: Callable[[str], None]) -> None:
    """Run the command: measure, tune, or measure a grid.

    Raises:
        ValueError: no GPU, an unsupported option or combination of options, or values of a grid that disagree.
    """
    command.check()
    if command.grid:
        grid_run.execute(command.grid_options(), command.path, say)
        return
    options = command.options()
    if not command.tune:
        limits, rows = measure_kernels(options, say)
        if command.path is not None:
            command.path.write_text(json.dumps(as_json(limits, rows), indent=1) + "\n")
        return
    options.check()
    rows_to_tune = options.rows or tune.ROWS
    written = tune.tune_linear(options.models, torch_dtype(options.dtype), rows_to_tune, command.output, say)
    say(f"written: {written}")


def print_line(line: str) -> None:
    """Write to standard output and flush."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    raise SystemExit(main())
