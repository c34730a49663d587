"""The servers of both frameworks as users start them, and the frameworks' own clients under a load.

`vllm serve` and `vllm bench serve` of vLLM 0.30 to 0.33, `sglang.launch_server` and `sglang.bench_serving` of SGLang
0.5.23. Native and atom differ by what the documentation of each framework tells users to set, and by nothing else.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from benchmarks._ran_with import SGLANG_LINES, VLLM_LINES, LogLines
from benchmarks._steady_cells import Cell
from tests.integration.processes import end_group, end_of, start_group
from tests.integration.server import Server, SglangServer, VllmServer, vllm_command

#: What a table has of each cell, in its order.
FIGURES = (
    "output tokens a second",
    "ttft p50, ms",
    "ttft p99, ms",
    "tpot p50, ms",
    "tpot p99, ms",
    "end to end p50, ms",
    "end to end p99, ms",
)
_PACKAGE_VARIABLE = "SGLANG_EXTERNAL_MODEL_PACKAGE"


class ClientFailed(Exception):
    """The client did not measure what it was asked for; the message says why, with the end of what it printed."""


@dataclass(frozen=True)
class Measured:
    """What a client found under a cell."""

    figures: Mapping[str, float]
    """By :data:`FIGURES`."""
    requests_per_second: float
    result: Mapping[str, Any]
    """What the client has written, without lists."""


class UsersVllm(VllmServer):
    """`vllm serve MODEL`, without what the tests set on a CPU."""

    cache: ClassVar[Sequence[str]] = ()


class UsersSglang(SglangServer):
    """`python -m sglang.launch_server --model-path MODEL`, without what the tests set on a CPU."""

    device: ClassVar[Sequence[str]] = ()
    cache: ClassVar[Sequence[str]] = ()
    defaults: ClassVar[Mapping[str, str]] = {}


class Framework(ABC):
    """How a framework is started, and asked."""

    lines: ClassVar[LogLines]
    """What its log says of kernels."""
    figures: ClassVar[Sequence[str]]
    """What :data:`FIGURES` are called in the client's result."""

    @abstractmethod
    def server(self, implementation: str, model: str, flags: Sequence[str], deadline: float) -> Server:
        """One that is not started yet; ``implementation`` is one of `IMPLEMENTATIONS`."""

    @abstractmethod
    def client(self, server: Server, cell: Cell, result: Path) -> list[str]:
        """The command that asks `server` and writes `result`."""

    def read(self, result: Path, cell: Cell, *, alike: bool = True) -> Measured:
        """What the client has written.

        Args:
            result: the file.
            cell: what it was asked for.
            alike: whether all answers should be as long as the cell says.

        Raises:
            ClientFailed: requests failed, or answers have another length than was asked for.
        """
        # SGLang's client writes a line for each run, and an unlimited rate as no JSON has it.
        found: dict[str, Any] = json.loads(result.read_text().splitlines()[-1], parse_constant=str)
        if found["completed"] != cell.num_prompts:
            raise ClientFailed(f"{cell.num_prompts - found['completed']} of {cell.num_prompts} requests failed")
        wanted = cell.num_prompts * cell.lengths.output_len
        if alike and found["total_output_tokens"] != wanted:
            raise ClientFailed(f"the answers have {found['total_output_tokens']} tokens where {wanted} were asked for")
        figures = {label: float(found[key]) for label, key in zip(FIGURES, self.figures, strict=True)}
        # What is left out are a number for each request, and all arguments of SGLang's server in each result.
        kept = {key: value for key, value in found.items() if not isinstance(value, list | dict)}
        return Measured(figures, float(found["request_throughput"]), kept)


class Vllm(Framework):
    """See :class:`Framework`."""

    lines = VLLM_LINES
    figures = (
        "output_throughput",
        *(f"p{percentile}_{it}_ms" for it in ("ttft", "tpot", "e2el") for percentile in (50, 99)),
    )

    def server(self, implementation: str, model: str, flags: Sequence[str], deadline: float) -> Server:
        """See :class:`Framework`."""
        ours = ("--model-impl", "atom") if implementation == "atom" else ()
        return UsersVllm(model, *ours, *flags, deadline=deadline)

    def client(self, server: Server, cell: Cell, result: Path) -> list[str]:
        """See :class:`Framework`."""
        command = [vllm_command(), "bench", "serve", "--backend", "vllm", "--base-url", server.url]
        command += ["--model", server.model, "--dataset-name", "random", "--ignore-eos", "--seed", str(cell.seed)]
        command += ["--random-input-len", str(cell.lengths.input_len)]
        command += ["--random-output-len", str(cell.lengths.output_len)]
        command += ["--num-prompts", str(cell.num_prompts), *cell.load_flags()]
        command += ["--percentile-metrics", "ttft,tpot,e2el", "--metric-percentiles", "50,99", "--disable-tqdm"]
        return [*command, "--save-result", "--result-dir", str(result.parent), "--result-filename", result.name]


class Sglang(Framework):
    """See :class:`Framework`."""

    lines = SGLANG_LINES
    figures = (
        "output_throughput",
        *(f"{which}_{it}_ms" for it in ("ttft", "tpot", "e2e_latency") for which in ("median", "p99")),
    )

    def server(self, implementation: str, model: str, flags: Sequence[str], deadline: float) -> Server:
        """See :class:`Framework`."""
        package = "atom_plugin.sglang.models" if implementation == "atom" else None
        return UsersSglang(model, *flags, environ={_PACKAGE_VARIABLE: package}, deadline=deadline)

    def client(self, server: Server, cell: Cell, result: Path) -> list[str]:
        """See :class:`Framework`."""
        command = [sys.executable, "-m", "sglang.bench_serving", "--backend", "sglang", "--base-url", server.url]
        # "random" would fetch texts; token ids and a range of 1 give every prompt and answer its exact length.
        command += ["--model", server.model, "--dataset-name", "random-ids", "--tokenize-prompt"]
        command += ["--random-range-ratio", "1.0", "--seed", str(cell.seed)]
        command += ["--random-input-len", str(cell.lengths.input_len)]
        command += ["--random-output-len", str(cell.lengths.output_len)]
        # Its own warm-up asks the first prompt, which the prefix cache would then have.
        command += ["--num-prompts", str(cell.num_prompts), *cell.load_flags(), "--warmup-requests", "0"]
        return [*command, "--disable-tqdm", "--output-file", str(result)]


FRAMEWORKS: Mapping[str, Framework] = {"vllm": Vllm(), "sglang": Sglang()}


def ask(framework: Framework, server: Server, cell: Cell, more: Sequence[str] = ()) -> Measured:
    """Put a load on a server that is ready.

    Args:
        framework: whose client asks.
        server: it is ready.
        cell: the load.
        more: further flags of the client.

    Raises:
        ClientFailed: the client or the server ended, or it measured something else.
    """
    with tempfile.TemporaryDirectory() as folder:
        result, log = Path(folder) / "result.json", Path(folder) / "log"
        with log.open("wb") as file:
            client = start_group([*framework.client(server, cell, result), *more], os.environ, file)
            try:
                returncode = _wait(client, server)
            finally:
                end_group(client)
        printed = end_of(log.read_text(errors="replace"), 30)
        if returncode is None:
            raise ClientFailed(f"the server ended with exit code {server.returncode}")
        if returncode or not result.exists():
            raise ClientFailed(f"the client ended with exit code {returncode}. The end of what it printed:\n{printed}")
        try:
            # With this flag both clients spread lengths around those of the cell.
            return framework.read(result, cell, alike=not any(it.startswith("--random-range-ratio") for it in more))
        except ClientFailed as error:
            raise ClientFailed(f"{error}. The end of what the client printed:\n{printed}") from None


def _wait(client: subprocess.Popen[bytes], server: Server) -> int | None:
    """The client's exit code; None: the server ended before, and would leave it waiting."""
    while server.returncode is None:
        try:
            return client.wait(0.5)
        except subprocess.TimeoutExpired:
            continue
    return client.poll()
