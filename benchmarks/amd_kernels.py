"""What every Triton kernel takes of gfx942 and gfx950, as docs/amd-kernels.md tabulates it.

    python -m benchmarks.amd_kernels

The tests that compile each kernel as its launcher launches it (tests/contract/triton_compiles) say what came
out; this runs them for the two GPUs, several at a time, and writes the page's tables. It takes minutes, or with a
TRITON_CACHE_DIR that has been filled before seconds. The same tests compare what they compile with the page.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks._amd_resources import Resources

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "amd-kernels.md"
TESTS = ROOT / "tests" / "contract" / "triton_compiles"

#: The property by which a test tells its rows.
PROPERTY = "amd kernel"

_BLOCK = re.compile(
    r"(<!-- written: python -m benchmarks\.amd_kernels -->\n).*(<!-- end of written -->)",
    re.DOTALL,
)
_ARCH = re.compile(r"-?(gfx\d+)")
_HEADER = "| Case | GPU | Vector registers | SGPRs | LDS, KiB | Waves a group | Waves a SIMD | Spills | MFMA |"


def case_of(test: str) -> tuple[str, str]:
    """What a test compiles, in words, and for which GPU: of its name, "test_routing_compiles[Qwen3-gfx942]"."""
    function, _, ids = test.removesuffix("]").partition("[")
    arch = _ARCH.search(ids)
    assert arch is not None, f"no GPU of AMD's in {test}"
    words = re.sub(r"_compiles?$", "", function.removeprefix("test_")).replace("_", " ")
    which = _ARCH.sub("", ids, count=1).removesuffix("-None").replace("torch.", "").strip("-").replace("-", ", ")
    return f"{words}: {which}" if which else words, arch[1]


@dataclass(frozen=True, order=True)
class Row:
    """A kernel as one test compiles it for one GPU."""

    kernel: str
    case: str
    arch: str
    figures: str
    """The other columns."""

    def __str__(self) -> str:
        return f"| {self.case} | {self.arch} | {self.figures} |"

    @classmethod
    def of(cls, kernel: str, case: str, resources: Resources) -> Row:
        """The row of what came out."""
        mfma = ("yes" if resources.mfma else "no") if resources.multiplies else ""
        return cls(kernel, case, resources.arch, f"{resources} | {resources.spilled} | {mfma}")


def rows_of(test: str, compiled: Iterable[tuple[str, Resources]]) -> Iterator[Row]:
    """What a test compiled, by kernel; launches of one kernel are numbered."""
    case, _ = case_of(test)
    seen: dict[str, int] = {}
    for kernel, resources in compiled:
        seen[kernel] = number = seen.get(kernel, 0) + 1
        yield Row.of(kernel, case if number == 1 else f"{case} ({number})", resources)


def page_rows(text: str) -> set[Row]:
    """The rows that a page has."""
    found, kernel = set(), ""
    for line in text.splitlines():
        if line.startswith("### `"):
            kernel = line.removeprefix("### `").removesuffix("`")
        elif kernel and (match := re.match(r"\| (.+?) \| (gfx\d+) \| (.*) \|$", line)):
            found.add(Row(kernel, *match.groups()))
    return found


def page_version(text: str) -> str:
    """The version of Triton that a page's rows were compiled by."""
    found = re.search(r"^Compiled by Triton (\S+)\.$", text, re.MULTILINE)
    assert found is not None, f"{PAGE.name} does not say which Triton it is of"
    return found[1]


def tables(rows: Iterable[Row], version: str) -> Iterator[str]:
    """What stands between the page's markers."""
    by_kernel: dict[str, list[Row]] = {}
    for row in sorted(set(rows)):
        by_kernel.setdefault(row.kernel, []).append(row)
    yield f"Compiled by Triton {version}."
    yield from ("", "## By kernel", "")
    yield "| Kernel | Cases | GPU | Most vector registers | Most LDS, KiB | Fewest waves a SIMD | MFMA |"
    yield "| --- | --- | --- | --- | --- | --- | --- |"
    for kernel, its in by_kernel.items():
        for arch in sorted({row.arch for row in its}):
            columns = [[part.strip() for part in row.figures.split("|")] for row in its if row.arch == arch]
            registers = max((int(it[0].split()[0]), it[0]) for it in columns)[1]
            lds, waves = max(float(it[2]) for it in columns), min(float(it[4]) for it in columns)
            mfma = ", ".join(sorted({it[6] for it in columns} - {""}))
            yield f"| `{kernel}` | {len(columns)} | {arch} | {registers} | {lds:g} | {waves:g} | {mfma} |"
    yield from ("", "## By case")
    for kernel, its in by_kernel.items():
        yield from ("", f"### `{kernel}`", "", _HEADER, "|" + " --- |" * (_HEADER.count("|") - 1))
        yield from map(str, its)


@dataclass
class Collector:
    """A plug-in of pytest's that keeps the rows of tests."""

    rows: list[Row] = field(default_factory=list)

    def pytest_runtest_logreport(self, report: Any) -> None:
        """See pytest."""
        if report.when == "teardown":
            self.rows += [Row(*value) for name, value in report.user_properties if name == PROPERTY]


def main() -> int:
    """Write the page."""
    import pytest
    import triton

    collector = Collector()
    options = ["-q", "--tb=no", "--no-header", "-p", "no:cacheprovider", "-k", "gfx942 or gfx950"]
    # Tests whose rows the page does not have yet fail ("E"), which is no news here.
    pytest.main([str(TESTS), *options, "--disable-warnings", "-r", "N", *sys.argv[1:]], plugins=[collector])
    if not collector.rows:
        print("Nothing was compiled.", file=sys.stderr)
        return 1
    text = PAGE.read_text(encoding="utf-8")
    block = "\n".join(tables(collector.rows, triton.__version__))
    PAGE.write_text(_BLOCK.sub(lambda match: f"{match[1]}\n{block}\n\n{match[2]}", text), encoding="utf-8")
    print(f"wrote {len(set(collector.rows))} rows to {PAGE.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
