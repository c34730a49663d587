"""Steady load on live servers, native and atom in turns, measured by the framework's own client.

    python -m benchmarks.steady vllm --model qwen3-8b --json steady.json
    python -m benchmarks.steady sglang --model qwen3-8b --lengths 1k/1k --concurrency 1 64 --rates half
    python -m benchmarks.steady vllm --model ./Qwen3-8B --server-flags="--max-num-seqs 512"

Run it with the Python that has the framework and atom-plugin installed. The servers start as users start them: `vllm
serve MODEL` or `python -m sglang.launch_server --model-path MODEL`. Ours differs by `--model-impl atom` or by
`SGLANG_EXTERNAL_MODEL_PACKAGE` alone, and everything else is the framework's default. So prefix caching and chunked
prefill are on. One server runs at a time, or with `--together` one is idle while the other has the load, and who goes
first alternates. The clients are `vllm bench serve` and `sglang.bench_serving`. A model's name stands for its published
`config.json`, with random weights and a tokenizer in which each token is a word.

Each server first gets a warm-up, which is not counted. For each pair of lengths these are the most requests at once and
a few at once, with short answers, and one request with its whole answer.

With N requests at once there are `--prompts-each` x N prompts, so that the start and the end of a cell matter little.
`--rates half` takes half of native's best request rate for the same lengths, from the cells of the first turn, and goes
on for as long as that best cell took. At a rate that is a number, requests arrive for `--seconds`. With fewer than 100
prompts, p99 is close to the slowest request.

The file `--json` is written after each cell, so it has what was measured when a later cell fails.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks import IMPLEMENTATIONS, _flash_attention_3
from benchmarks._figures import Row, as_json, summarise
from benchmarks._gpu import RANDOM, count, model_folder
from benchmarks._ran_with import device, versions
from benchmarks._steady_cells import Cell, Lengths, Plan, read_rate
from benchmarks._steady_frameworks import FIGURES, FRAMEWORKS, ClientFailed, Measured, ask
from benchmarks._tokenizer import write_tokenizer
from tests.integration.processes import end_of
from tests.integration.server import Server, ServerFailed


class Steady:
    """All turns of a benchmark."""

    def __init__(self, arguments: argparse.Namespace, model: str) -> None:
        self.arguments, self.model = arguments, model
        self.framework = FRAMEWORKS[arguments.framework]
        self.plan = Plan(
            arguments.lengths,
            arguments.concurrency,
            arguments.rates,
            arguments.prompts_each,
            arguments.least_prompts,
            arguments.seconds,
        )
        self.machine = {"device": device(), "versions": versions()}
        self.servers: list[dict[str, Any]] = []
        self.cells: list[dict[str, Any]] = []
        self.figures: dict[str, dict[str, list[float]]] = {}
        self.native: dict[Cell, float] = {}
        self.phase = "the first server"

    def run(self) -> None:
        """Measure; every turn has a server of each, or asks the only one of each."""
        with ExitStack() as stack:
            started = {}
            if self.arguments.together:
                # One after the other: vLLM measures what memory it takes, and fails where another takes some too.
                for name in IMPLEMENTATIONS:
                    started[name] = self._server(0, name)
                    self._start(0, name, started[name], stack)
                for name, server in started.items():
                    self._warm_up(0, name, server)
            names = list(IMPLEMENTATIONS)
            for turn in range(self.arguments.turns):
                for name in names if turn % 2 == 0 else names[::-1]:
                    if self.arguments.together:
                        self._cells(turn, name, started[name])
                    else:
                        self._serve(turn, name)

    def _serve(self, turn: int, name: str) -> None:
        """A server's whole turn."""
        server = self._server(turn, name)
        with ExitStack() as stack:
            self._start(turn, name, server, stack)
            self._warm_up(turn, name, server)
            self._cells(turn, name, server)

    def _server(self, turn: int, name: str) -> Server:
        given = self.arguments
        flags = ["--load-format", given.load_format] if given.load_format == "dummy" else []
        flags += [*given.server_flags, *(given.atom_flags if name == "atom" else given.native_flags)]
        server = self.framework.server(name, self.model, flags, given.deadline)
        self.servers.append({"turn": turn, "implementation": name, "command": shlex.join(server.command)})
        return server

    def _start(self, turn: int, name: str, server: Server, stack: ExitStack) -> None:
        begun = time.monotonic()
        with self._named(f"{name}, turn {turn}, start", server):
            stack.enter_context(server)
        seconds = self._last(name)["ready_s"] = round(time.monotonic() - begun, 1)
        print(f"{name}, turn {turn}: ready after {seconds} s", flush=True)

    def _last(self, name: str) -> dict[str, Any]:
        return next(it for it in reversed(self.servers) if it["implementation"] == name)

    def _warm_up(self, turn: int, name: str, server: Server) -> None:
        for cell in self.plan.warm_up():
            with self._named(f"{name}, turn {turn}, warm-up of {cell}", server):
                ask(self.framework, server, cell, self.arguments.client_flags)

    def _cells(self, turn: int, name: str, server: Server) -> None:
        asked = turn if self.arguments.together else 0
        for cell in self.plan.at_once(asked):
            measured = self._measure(turn, name, server, cell)
            if turn == 0 and name == "native":
                self.native[cell] = measured.requests_per_second
        for cell in self.plan.at_rates(self.native, asked):
            self._measure(turn, name, server, cell)
        # Some lines come with the first requests that need a kernel.
        found = self._last(name)
        found["ran_with"] = self.framework.lines.read(server.log)
        found["startup_report"] = server.startup_report()
        self._write()

    def _measure(self, turn: int, name: str, server: Server, cell: Cell) -> Measured:
        with self._named(f"{name}, turn {turn}, {cell}", server):
            measured = ask(self.framework, server, cell, self.arguments.client_flags)
        for label, value in measured.figures.items():
            self.figures.setdefault(f"{cell}: {label}", {}).setdefault(name, []).append(value)
        of_cell = {"lengths": str(cell.lengths), "load": cell.load, **asdict(cell)}
        self.cells.append({"turn": turn, "implementation": name, "cell": of_cell, "result": measured.result})
        shown = ", ".join(f"{label} {value:.4g}" for label, value in measured.figures.items())
        print(f"{name}, turn {turn}, {cell}: {shown}", flush=True)
        self._write()
        return measured

    @contextmanager
    def _named(self, phase: str, server: Server) -> Iterator[None]:
        """Say of what fails which server it was, what it was doing, and how its log ends."""
        self.phase = phase
        try:
            yield
        except ServerFailed as error:
            raise SystemExit(f"{phase}: {error}") from None
        except ClientFailed as error:
            raise SystemExit(f"{phase}: {error}\nThe end of the server's log:\n{end_of(server.log)}") from None

    def rows(self) -> list[Row]:
        """Of what both have, in as many turns."""
        rounds = {}
        for figure, values in self.figures.items():
            turns = min(len(values.get(name, [])) for name in IMPLEMENTATIONS)
            if turns:
                rounds[figure] = {name: values[name][:turns] for name in IMPLEMENTATIONS}
        return summarise(rounds)

    def ran_with(self, name: str) -> dict[str, list[str]]:
        """What the logs of an implementation's servers name, by kind."""
        found: dict[str, dict[str, None]] = {}
        for server in self.servers:
            if server["implementation"] == name:
                for kind, lines in server.get("ran_with", {}).items():
                    found.setdefault(kind, {}).update(dict.fromkeys(lines))
        return {kind: list(lines) for kind, lines in found.items()}

    def report(self) -> str:
        """Tables, and what native ran with."""
        return tables(self.rows()) + named_kernels(self.ran_with("native"))

    def _write(self) -> None:
        """Into the file: all there is until now."""
        if self.arguments.json is None:
            return
        asked = {name: str(value) for name, value in vars(self.arguments).items() if name != "json"}
        found = {
            "asked": asked,
            **self.machine,
            "native_ran_with": self.ran_with("native"),
            "rows": as_json(self.rows()),
            "servers": self.servers,
            "cells": self.cells,
        }
        self.arguments.json.write_text(json.dumps(found, indent=1) + "\n")


def tables(rows: Sequence[Row]) -> str:
    """A table for each pair of lengths, a row for each load: native, atom, and the ratio with its spread over turns."""
    by_lengths: dict[str, dict[str, dict[str, str]]] = {}
    for row in rows:
        cell, _, figure = row.figure.partition(": ")
        lengths, _, load = cell.partition(", ")
        spread = "" if row.least_ratio == row.most_ratio else f" ({row.least_ratio:.2f} to {row.most_ratio:.2f})"
        text = f"{row.native.median:.4g} / {row.atom.median:.4g} = {row.ratio:.2f}{spread}"
        by_lengths.setdefault(lengths, {}).setdefault(load, {})[figure] = text
    lines = []
    for lengths, loads in by_lengths.items():
        lines += [f"{lengths} tokens in and out, native / atom = ratio; above 1, atom is better:", ""]
        lines += [f"| load | {' | '.join(FIGURES)} |", "| --- " * (1 + len(FIGURES)) + "|"]
        lines += [
            f"| {load} | {' | '.join(found.get(figure, '') for figure in FIGURES)} |" for load, found in loads.items()
        ]
        lines.append("")
    return "\n".join(lines) + "\n" if lines else ""


def named_kernels(ran_with: Mapping[str, Sequence[str]]) -> str:
    """What native ran with, a line for each kind; nothing where no server has told."""
    if not ran_with:
        return ""
    lines = ["native ran with, by its own log:", ""]
    lines += [f"- {kind}: {'; '.join(found) or 'its log names none'}" for kind, found in ran_with.items()]
    return "\n".join(lines) + "\n"


def read_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line; None: the process's."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("framework", choices=list(FRAMEWORKS))
    parser.add_argument("--model", default="qwen3-8b", help="a name, a config.json, or a checkpoint's folder")
    parser.add_argument("--layers", type=int, help="keep so many layers of a name or a config.json")
    parser.add_argument(
        "--load-format",
        choices=("auto", *RANDOM),
        help="auto: what the folder has, its default; dummy: each server's own random weights, the default of a name; "
        "random: one checkpoint of random weights for both, written where TMPDIR says",
    )
    default = [Lengths(1024, 1024), Lengths(8192, 1024), Lengths(1024, 8192)]
    parser.add_argument("--lengths", type=Lengths.read, nargs="+", default=default, help="tokens in/out, as 8k/1k")
    parser.add_argument("--concurrency", type=count, nargs="*", default=[1, 4, 16, 64, 256], help="requests at once")
    parser.add_argument("--rates", type=read_rate, nargs="*", default=[None], help="requests a second, or half")
    parser.add_argument("--prompts-each", type=count, default=4, help="prompts for each of the requests at once")
    parser.add_argument("--least-prompts", type=count, default=16, help="of any cell")
    parser.add_argument("--seconds", type=float, default=60.0, help="how long requests arrive at a rate")
    parser.add_argument(
        "--turns",
        type=count,
        default=2,
        help="how often each is measured; once shows no spread",
    )
    parser.add_argument(
        "--together",
        action="store_true",
        help="one server of each for all turns; they share the GPU, so give both "
        '--server-flags="--gpu-memory-utilization 0.45" or the like',
    )
    for option, what in (
        ("--server-flags", "of both servers"),
        ("--native-flags", "of native's server"),
        ("--atom-flags", "of ours"),
        ("--client-flags", "of the client"),
    ):
        parser.add_argument(option, type=shlex.split, default=[], help=f'more flags {what}: {option}="--one 1 --two"')
    parser.add_argument("--deadline", type=float, default=1800.0, help="seconds in which a server must be ready")
    parser.add_argument("--json", type=Path, help="write everything there")
    _flash_attention_3.add_option(parser)
    given = parser.parse_args(arguments)
    if given.flash_attention_3 and given.framework != "sglang":
        parser.error("--flash-attention-3 is for sglang; vLLM has its own")
    folder = Path(given.model).is_dir()
    given.load_format = given.load_format or ("auto" if folder else "dummy")
    if given.load_format == "auto" and not folder:
        parser.error(f"--load-format auto needs a checkpoint's folder; {given.model} is none")
    if given.load_format == "auto" and given.layers:
        parser.error("--layers needs random weights: --load-format dummy or random")
    if None in given.rates and not given.concurrency:
        parser.error("--rates half needs native's rates: at least one --concurrency")
    return given


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    given = read_arguments(arguments)
    # Whoever ends this process politely, `timeout` for one, has its server and its client ended with it.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    # Servers have it from this process.
    os.environ |= _flash_attention_3.variables(given.flash_attention_3)
    with model_folder(given) as model:
        if given.load_format in RANDOM:
            write_tokenizer(Path(model))
        steady = Steady(given, model)
        try:
            steady.run()
        except KeyboardInterrupt:
            raise SystemExit(f"{steady.phase}: interrupted") from None
        finally:
            print(steady.report(), end="")


if __name__ == "__main__":
    main()
