"""What a comparison of engines keeps of their logs."""

from __future__ import annotations

import argparse
import sys

from benchmarks._gpu import Turns
from benchmarks._served import Served
from benchmarks._together import Together

LINE = "INFO 11-28 10:00:00 [cuda.py:1] Using FLASH_ATTN attention backend out of potential backends"
FOUND = ["Using FLASH_ATTN attention backend out of potential backends"]


def _process(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def test_engines_in_turns_say_what_they_ran_with(monkeypatch):
    code = f"import sys; print({LINE!r}); open(sys.argv[sys.argv.index('--result') + 1], 'w').write('{{}}')"
    monkeypatch.setattr("benchmarks._gpu.serve_command", lambda *given: _process(code))
    found = Turns("vllm_gpu", argparse.Namespace(), "model")._engine("native")
    assert found["ran_with"]["attention"] == FOUND


def test_engines_at_once_say_what_they_ran_with(monkeypatch):
    code = f"import os, sys; print({LINE!r}, flush=True); os.write(int(sys.argv[-1]), b'{{}}\\n')"
    monkeypatch.setattr("benchmarks._together.serve_command", lambda *given: _process(code))
    both = Together("vllm_gpu", argparse.Namespace(), "model")
    both.end()
    assert {name: found["attention"] for name, found in both.details()["ran_with"].items()} == {
        "native": FOUND,
        "atom": FOUND,
    }
    assert both.native_kernels() == FOUND


def test_a_process_that_ended_has_all_that_it_printed():
    one = Served("one", _process("print('begun', flush=True); import sys; print('ended', file=sys.stderr)"))
    one.process.wait()
    assert one.printed().split() == ["begun", "ended"]
