"""All that can be checked and measured on this machine's GPU, in one file that can be sent to the maintainers.

    python -m benchmarks.gpu_report report.md                 # or: nox -s gpu -- --report report.md

What `atom-plugin doctor` finds; every kernel against its reference; accuracy of the trained checkpoints beside native
vLLM, by lm-eval against live servers, and of dense ones by engines alone that are also run twice; decoding beside
native vLLM, of the default model with random weights; each kernel's time. A part that fails is reported and does not
stop the others. Nothing is fetched, and no name of a machine or path is added to what parts say. lm-eval is looked for
in LM_EVAL, which nox sets, and on the PATH.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

#: Lines kept of what a part says: the last are its results.
LAST_LINES = 400

PYTHON = (sys.executable, "-m")
PARTS: Mapping[str, tuple[str, ...]] = {
    "Doctor": (*PYTHON, "atom_plugin.cli", "doctor"),
    "Kernels against their references": (*PYTHON, "pytest", "tests/gpu", "-q", "--color=no"),
    "lm-eval beside native vLLM": (*PYTHON, "benchmarks.accuracy", "--copies", "tests/checkpoints"),
    "Accuracy beside native vLLM": (*PYTHON, "benchmarks.gpu_accuracy", "--concurrency", "1", "16"),
    "Decoding beside native vLLM": (*PYTHON, "benchmarks.vllm_gpu", "--no-plot"),
    "Each kernel's time": (*PYTHON, "atom_plugin.cli", "bench", "kernels"),
}


def run_part(title: str, command: Sequence[str], seconds: float) -> tuple[bool, str]:
    """Run one part: whether it succeeded, and its chapter of the report."""
    begun = time.monotonic()
    try:
        result = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=seconds, check=False
        )
        said, outcome = result.stdout, "passed" if result.returncode == 0 else f"FAILED, exit {result.returncode}"
    except subprocess.TimeoutExpired as error:
        said = error.stdout.decode(errors="replace") if isinstance(error.stdout, bytes) else error.stdout or ""
        outcome = f"FAILED, stopped after {seconds:.0f} s"
    lines = said.rstrip().splitlines()
    left_out = [f"[{len(lines) - LAST_LINES} lines before]"] if len(lines) > LAST_LINES else []
    shown = " ".join(["python", *command[1:]] if command[0] == sys.executable else command)
    heading = f"## {title}: {outcome} in {time.monotonic() - begun:.0f} s"
    body = "\n".join([*left_out, *lines[-LAST_LINES:]])
    return outcome == "passed", f"{heading}\n\n`{shown}`\n\n~~~~text\n{body}\n~~~~\n"


def write_report(path: Path, parts: Mapping[str, Sequence[str]], seconds: float) -> list[str]:
    """Run all parts, with the file growing as they end; the titles of those that failed."""
    failed = []
    path.write_text("# atom-plugin on this GPU\n")
    for title, command in parts.items():
        print(f"==== {title} ====", flush=True)
        passed, chapter = run_part(title, command, seconds)
        with path.open("a") as file:
            file.write(f"\n{chapter}")
        if not passed:
            failed.append(title)
    with path.open("a") as file:
        file.write(f"\n{len(parts) - len(failed)} of {len(parts)} parts passed.\n")
    return failed


def main() -> int:
    """Exit 1 if a part failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("report", type=Path)
    parser.add_argument("--seconds", type=float, default=7200, help="the longest that a part may take")
    arguments = parser.parse_args()
    failed = write_report(arguments.report, PARTS, arguments.seconds)
    print(f"{arguments.report} is written. " + (f"Failed: {', '.join(failed)}." if failed else "All parts passed."))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
