"""Print the table of one machine of docs/performance.md, from docs/figures/engines.json.

    python tools/performance.py H200

`python tools/generated.py` writes it into the page. A row is a model, a framework and what native ran with. A cell is
`ratio (least to most)` of one comparison; where several comparisons, or several measurements of one, are shown, it is
the least and the most of their ratios. Below the table stands a command for each row.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

ENGINES = Path(__file__).resolve().parent.parent / "docs" / "figures" / "engines.json"
#: Marks of the page's footnotes: what native ran with where its users have something faster.
MARKS = {"no DeepGEMM, no FlashInfer FP8 product": "¹", "Triton's attention": "²"}

Run = Mapping[str, Any]


def runs(file: Path = ENGINES) -> list[Run]:
    """All comparisons of engines; some are shown on the page."""
    found: list[Run] = json.loads(file.read_text(encoding="utf-8"))["runs"]
    return found


def machines(every: Iterable[Run]) -> list[str]:
    """The machines that have a table."""
    return list(dict.fromkeys(run["machine"] for run in every if run["in_table"]))


def table(every: Iterable[Run], machine: str) -> str:
    """One row a model, framework and configuration of native, and the commands that measure them.

    Raises:
        ValueError: nothing is shown for this machine.
    """
    every = list(every)
    shown = rows(every, machine)
    if not shown:
        raise ValueError(f"machine {machine!r} has no table; those that have: {', '.join(machines(every))}")
    requests = sorted({result["requests"] for same in shown for run in same for result in run["results"]})
    counts = ("1 request" if count == 1 else f"{count} requests" for count in requests)
    head = ["model", "framework", *counts, "native ran with", "command"]
    lines = [_line(head), _line("---" for _ in head)]
    for number, same in enumerate(shown, 1):
        first = same[0]
        native = first["native_ran_with"]
        mark = f" {MARKS[native]}" if native in MARKS else ""
        framework = f"{first['framework']} {first['version']}"
        cells = (_cell(same, count) for count in requests)
        lines.append(_line([first["model"], framework, *cells, native + mark, str(number)]))
    commands = (_commands(number, same) for number, same in enumerate(shown, 1))
    return "\n".join([*lines, "", "The commands:", "", *commands])


def rows(every: Iterable[Run], machine: str) -> list[list[Run]]:
    """The comparisons that are one row: of one model, framework and configuration of native."""
    found: dict[tuple[str, ...], list[Run]] = {}
    for run in every:
        if run["in_table"] and run["machine"] == machine:
            key = (run["model"], run["framework"], run["version"], run["native_ran_with"])
            found.setdefault(key, []).append(run)
    return list(found.values())


def ratios_at(same: Iterable[Run], requests: int) -> list[float]:
    """All ratios of a row for a number of requests."""
    ratios: list[float] = []
    for result in _at(same, requests):
        ratio = result["ratio"]
        ratios += ratio if isinstance(ratio, Sequence) else [ratio]
    return ratios


def _at(same: Iterable[Run], requests: int) -> Iterator[Mapping[str, Any]]:
    for run in same:
        yield from (result for result in run["results"] if result["requests"] == requests)


def _cell(same: Sequence[Run], requests: int) -> str:
    ratios = ratios_at(same, requests)
    if not ratios:
        return ""
    if len(ratios) > 1:
        return _span(min(ratios), max(ratios))
    (result,) = _at(same, requests)
    spread = result.get("ratio_spread")
    return f"{ratios[0]:.2f}" + (f" ({_span(*spread)})" if spread else "")


def _span(least: float, most: float) -> str:
    low, high = f"{least:.2f}", f"{most:.2f}"
    return low if low == high else f"{low} to {high}"


def _commands(number: int, same: Sequence[Run]) -> str:
    commands = dict.fromkeys(run["command"] for run in same)
    return "\n".join(f"    {f'{number}.' if at == 0 else '':<4}{command}" for at, command in enumerate(commands))


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    print(table(runs(), sys.argv[1]))
