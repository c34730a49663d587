"""A framework whose servers and clients are small scripts, for `benchmarks.steady` without a model.

`python -m tests.unit.plugin.bench.steady_fakes ARGUMENTS` is the benchmark with it.
"""

from __future__ import annotations

import re
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import steady
from benchmarks._ran_with import LogLines
from benchmarks._steady_cells import Cell
from benchmarks._steady_frameworks import FIGURES, Framework
from tests.integration.server import Server

SERVE = """
import http.server, os, sys, time
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        if self.path == "/end":
            print("out of memory", flush=True)
            os._exit(3)
        self.send_response(200)
        self.end_headers()
if "--broken" in sys.argv:
    raise SystemExit("no such flag: --broken")
print("INFO Using GREAT attention", flush=True)
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
CLIENT = """
import json, sys, time, urllib.request
url, result, name, concurrency, rate, prompts, output_len = sys.argv[1:8]
flags = sys.argv[8:]
cell = f"{concurrency} {rate}"
if "--sleep" in flags:
    print("asleep", flush=True)
    time.sleep(600)
if "--end" in flags and rate != "None":
    try:
        urllib.request.urlopen(url + "/end")
    except OSError:
        time.sleep(600)
if "--fail" in flags:
    print("who asks?")
    raise SystemExit(7)
lost = 1 if "--lose" in flags else 0
slow = 2.0 if name == "native" else 1.0
found = dict.fromkeys(FIGURES, 10.0 * slow)
found["output tokens a second"] = 100.0 / slow
found["request_throughput"] = (float(rate) if rate != "None" else 8.0 * int(concurrency)) / slow
found["completed"] = int(prompts)
found["total_output_tokens"] = int(prompts) * int(output_len) - lost
json.dump(found, open(result, "w"))
""".replace("FIGURES", repr(FIGURES))


class FakeServer(Server):
    """Healthy, and no more."""

    @property
    def command(self) -> list[str]:
        """See :class:`Server`."""
        return [sys.executable, "-c", SERVE, str(self.port), *self.flags]

    def startup_report(self) -> list[str]:
        """See :class:`Server`."""
        return ["our table"]


class Fake(Framework):
    """See :class:`Framework`; it notes what it is asked for."""

    lines = LogLines(re.compile("^INFO "), {"attention": re.compile("Using .* attention"), "GEMM": re.compile("-")}, {})
    figures = FIGURES

    def __init__(self) -> None:
        self.asked: list[tuple[str, Cell]] = []
        self.serving: list[tuple[str, str]] = []

    def server(self, implementation: str, model: str, flags: Sequence[str], deadline: float) -> Server:
        """See :class:`Framework`."""
        self.serving.append((implementation, (Path(model) / "tokenizer.json").read_text()[:12]))
        return FakeServer(implementation, *flags, deadline=deadline)

    def client(self, server: Server, cell: Cell, result: Path) -> list[str]:
        """See :class:`Framework`."""
        self.asked.append((server.model, cell))
        numbers = (cell.concurrency, cell.rate, cell.num_prompts, cell.lengths.output_len)
        return [sys.executable, "-c", CLIENT, server.url, str(result), server.model, *map(str, numbers)]


def main(*arguments: Any) -> Fake:
    """The benchmark with this framework."""
    fake = Fake()
    steady.FRAMEWORKS = {"fake": fake}
    steady.device = lambda: {"gpus": ["a GPU"]}
    steady.main(["fake", *map(str, arguments)])
    return fake


if __name__ == "__main__":
    # What a shell starts in the background ignores interrupts.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    main(*sys.argv[1:])
