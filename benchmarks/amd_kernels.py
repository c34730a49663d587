"""The registers, LDS and matrix instructions of every Triton kernel on gfx942 and gfx950.

    python -m benchmarks.amd_kernels            # compile all, and write what comes out; no GPU is needed
    python -m benchmarks.amd_kernels --table    # the table of docs/amd-kernels.md, of what was written last

The tests in tests/contract/triton_compiles compile each kernel as its launcher launches it. The first command runs the
tests of AMD's GPUs and writes amd_resources.json beside them; the same tests compare what they compile with that file.
It takes minutes, or about one with a TRITON_CACHE_DIR that has been filled before.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks._amd_resources import LDS, Resources

ROOT = Path(__file__).resolve().parent.parent
TESTS = ROOT / "tests" / "contract" / "triton_compiles"
FIXTURE = TESTS / "amd_resources.json"

#: The property by which a test hands over what it compiled.
PROPERTY = "amd kernels"

#: By kernel ("rms_norm.triton_kernel._rms_norm"): a test's launches of it, in order.
Launches = dict[str, list[Resources]]


@dataclass
class Compiled:
    """What tests compiled for AMD's GPUs."""

    triton: str
    """The version of Triton that compiled it."""
    kernels: dict[str, dict[str, list[Resources]]] = field(default_factory=dict)
    """By kernel and by test ("test_rms_norm_compiles[alone-128-gfx942]"): its launches, in order."""

    def add(self, test: str, launches: Launches) -> None:
        """Take in what a test compiled."""
        for kernel, resources in launches.items():
            self.kernels.setdefault(kernel, {})[test] = resources

    def of(self, test: str) -> Launches:
        """What a test compiled."""
        return {kernel: tests[test] for kernel, tests in self.kernels.items() if test in tests}

    @property
    def tests(self) -> set[str]:
        """All that compiled something."""
        return {test for tests in self.kernels.values() for test in tests}

    def __str__(self) -> str:
        """As JSON, with a line for each kernel and test."""
        sections = (
            f"  {json.dumps(kernel)}: {{\n"
            + ",\n".join(
                f"   {json.dumps(test)}: {json.dumps([asdict(it) for it in launches])}"
                for test, launches in sorted(tests.items())
            )
            + "\n  }"
            for kernel, tests in sorted(self.kernels.items())
        )
        return f'{{\n "triton": {json.dumps(self.triton)},\n "kernels": {{\n' + ",\n".join(sections) + "\n }\n}\n"

    @classmethod
    def read(cls, text: str) -> Compiled:
        """Of what :meth:`__str__` gives."""
        found = json.loads(text)
        return cls(
            found["triton"],
            {
                kernel: {test: [Resources(**it) for it in launches] for test, launches in tests.items()}
                for kernel, tests in found["kernels"].items()
            },
        )


def by_kernel(compiled: Iterable[tuple[str, Resources]]) -> Launches:
    """A test's launches, each with its kernel's name."""
    found: Launches = {}
    for kernel, resources in compiled:
        found.setdefault(kernel, []).append(resources)
    return found


def handed_over(launches: Launches) -> str:
    """As a test's property, which processes of pytest's may send one another."""
    return json.dumps({kernel: [asdict(it) for it in found] for kernel, found in launches.items()})


def taken_over(value: str) -> Launches:
    """Of what :func:`handed_over` gives."""
    return {kernel: [Resources(**it) for it in found] for kernel, found in json.loads(value).items()}


def table(compiled: Compiled) -> Iterator[str]:
    """One row an op: of all of its launches the most registers and LDS, and the fewest waves."""
    by_op: dict[str, list[dict[str, list[Resources]]]] = {}
    for kernel, tests in sorted(compiled.kernels.items()):
        by_op.setdefault(kernel.partition(".")[0], []).append(tests)
    yield f"Compiled by Triton {compiled.triton}; in each cell gfx942 / gfx950."
    yield ""
    yield "| Op | Kernels | Launches | Most VGPRs | Most LDS, KiB | Fewest waves a SIMD | Most VGPRs spilled | MFMA |"
    yield "| --- | --- | --- | --- | --- | --- | --- | --- |"
    for op, kernels in by_op.items():
        launches = {
            arch: [it for tests in kernels for found in tests.values() for it in found if it.arch == arch]
            for arch in LDS
        }
        cells = (
            [len(found) for found in launches.values()],
            [max(it.vgprs for it in found) for found in launches.values()],
            [_kib(max(it.lds for it in found)) for found in launches.values()],
            [f"{min(it.waves for it in found):g}" for found in launches.values()],
            [max(it.spilled for it in found) for found in launches.values()],
            [_matrix_cores(found) for found in launches.values()],
        )
        yield f"| `{op}` | {len(kernels)} | " + " | ".join(_both(cell) for cell in cells) + " |"


def _kib(size: int) -> str:
    """Bytes as KiB."""
    return "<1" if 0 < size < 1024 else f"{size / 1024:.3g}"


def _matrix_cores(launches: Iterable[Resources]) -> str:
    """Whether what multiplies matrices does so by them."""
    found = {it.mfma for it in launches if it.multiplies}
    return "" if not found else "yes" if found == {True} else "no"


def _both(cell: Iterable[Any]) -> str:
    """One value where it is the same on both GPUs."""
    return " / ".join(dict.fromkeys(str(it) for it in cell))


@dataclass
class Collector:
    """A plug-in of pytest's that takes in what tests compile."""

    compiled: Compiled

    def pytest_runtest_logreport(self, report: Any) -> None:
        """See pytest."""
        if report.when == "teardown":
            test = report.nodeid.partition("::")[2]
            for name, value in report.user_properties:
                if name == PROPERTY:
                    self.compiled.add(test, taken_over(value))


def main() -> int:
    """See the module's text."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.amd_kernels", description="See the module's text.")
    parser.add_argument("--table", action="store_true", help="print the table of docs/amd-kernels.md")
    if parser.parse_args().table:
        print("\n".join(table(Compiled.read(FIXTURE.read_text(encoding="utf-8")))))
        return 0
    import pytest
    import triton

    collector = Collector(Compiled(triton.__version__))
    options = ["-q", "--tb=no", "--no-header", "-p", "no:cacheprovider", "-k", "gfx942 or gfx950"]
    # Tests of which the file does not have yet what they compile now fail ("E"), which is no news here.
    pytest.main([str(TESTS), *options, "--disable-warnings", "-r", "N"], plugins=[collector])
    if not collector.compiled.kernels:
        print("Nothing was compiled.", file=sys.stderr)
        return 1
    FIXTURE.write_text(str(collector.compiled), encoding="utf-8")
    print(f"wrote {FIXTURE.relative_to(ROOT)}: {len(collector.compiled.tests)} tests; now: python tools/generated.py")
    return 0


if __name__ == "__main__":
    sys.exit(main())
