"""Draws docs/figures/speedups.svg, the README's figure, from the comparisons in docs/figures/engines.json.

    python -m benchmarks.speedups

It has the rows of docs/performance.md that are of GPUs: one panel a number of requests, one line a row. A bar goes from
1, where both are as fast, to the ratio; of several measurements it goes to the least, and a line shows their range.
Rows with a footnote have pale bars: native lacked something there that its users have. The SVG is written as text, so
that equal ratios give equal files.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path

from tools.performance import MARKS, Run, ratios_at, rows, runs

FIGURE = Path(__file__).parents[1] / "docs" / "figures" / "speedups.svg"

TITLE = "Native's time a token divided by ours: above 1, atom-plugin is faster"
SUBTITLE = "Decoding with random weights on an H200, side by side; a line is the range of several measurements"
REQUESTS = (1, 8, 64, 256)
#: By heading: the framework, and its machines with what a row of each has behind the model.
GROUPS: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "vLLM, one GPU": ("vLLM", {"H200": "", "H100": ", H100"}),
    "vLLM, several GPUs": ("vLLM", {"2xH200": ", two GPUs", "4xH200": ", four GPUs"}),
    "SGLang, one GPU": ("SGLang", {"H200": ""}),
}
#: Machines that the figure leaves to the page.
LEFT_OUT = ("CPU",)
NOTES = {
    "¹": "Native ran without DeepGEMM and FlashInfer's FP8 product, which it has for its users on Hopper.",
    "²": (
        "Native ran on Triton's attention; its default on Hopper is FlashAttention 3, beside which the rows of SGLang "
        "without this mark are measured."
    ),
}
#: What native ran with where a row says so by name.
NAMED = {"DeepGEMM": ", native with DeepGEMM"}

#: Pixels: the labels' column, a panel and the gap behind it, a row, and the head and foot of the figure.
LABELS, PANEL, GAP, ROW, HEAD, NOTE = 310, 150, 18, 19, 84, 17
#: The ratios at the two ends of a panel; the rest of its width is for the number behind a bar.
LEAST, MOST, NUMBER = 0.8, 2.0, 42
INK, PALE_INK, SLOWER = "#1f2937", "#6b7280", "#b91c1c"
BAR, PALE_BAR = "#2563eb", "#a9c4f5"


def draw(every: Sequence[Run]) -> str:
    """The SVG of comparisons as :func:`tools.performance.runs` gives them.

    Raises:
        ValueError: a ratio that no panel can show, or a machine that no group has.
    """
    known = {(framework, machine) for framework, machines in GROUPS.values() for machine in machines}
    for run in every:
        if run["in_table"] and run["machine"] not in LEFT_OUT and (run["framework"], run["machine"]) not in known:
            raise ValueError(f"No group of the figure has {run['framework']} on {run['machine']}.")
    width = LABELS + len(REQUESTS) * (PANEL + GAP)
    body, y = [], HEAD
    for title, (framework, machines) in GROUPS.items():
        body.append(_text(12, y + 14, title, bold=True))
        y += ROW + 4
        for machine, suffix in machines.items():
            for same in rows((run for run in every if run["framework"] == framework), machine):
                body += _row(same, suffix, y)
                y += ROW
        y += 8
    axes = [line for index, requests in enumerate(REQUESTS) for line in _axis(index, requests, y)]
    notes = [
        _text(12, y + 18 + NOTE * index, f"{mark} {text}", size=11, ink=PALE_INK)
        for index, (mark, text) in enumerate(NOTES.items())
    ]
    height = y + 18 + NOTE * len(notes)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'font-family="system-ui, sans-serif" role="img">',
        f"<title>{escape(TITLE)}</title>",
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        _text(12, 24, TITLE, size=16, bold=True),
        _text(12, 43, SUBTITLE, ink=PALE_INK),
        *axes,
        *body,
        *notes,
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def _axis(index: int, requests: int, bottom: int) -> Iterator[str]:
    """A panel's heading, and the line where both are as fast."""
    yield _text(_left(index), HEAD - 16, f"{requests} request{'' if requests == 1 else 's'} at once", bold=True)
    x = _x(index, 1.0)
    yield f'<line x1="{x}" y1="{HEAD - 6}" x2="{x}" y2="{bottom - 4}" stroke="#9ca3af"/>'


def _row(same: Sequence[Run], suffix: str, y: int) -> Iterator[str]:
    """A model's name, and its bar in each panel."""
    native = same[0]["native_ran_with"]
    mark = MARKS.get(native)
    label = same[0]["model"] + suffix + NAMED.get(native, "") + (f" {mark}" if mark else "")
    yield _text(24, y + 13, label)
    for index, requests in enumerate(REQUESTS):
        if ratios := ratios_at(same, requests):
            yield from _bar(index, ratios, y, pale=mark is not None)


def _bar(index: int, ratios: Sequence[float], y: int, *, pale: bool) -> Iterator[str]:
    """A bar from 1 to the least ratio, a line to the most, and both as numbers."""
    least, most = min(ratios), max(ratios)
    if least < LEAST or most > MOST:
        raise ValueError(f"The ratios {ratios} are not within {LEAST} and {MOST}, which the panels show.")
    start, end, last = _x(index, min(1.0, least)), _x(index, max(1.0, least)), _x(index, most)
    ink = SLOWER if least < 1 else PALE_BAR if pale else BAR
    if end > start:
        yield f'<rect x="{start}" y="{y + 3}" width="{round(end - start, 1)}" height="{ROW - 7}" fill="{ink}"/>'
    if most > least:
        middle = y + (ROW - 1) / 2
        ends = f'x1="{_x(index, least)}" y1="{middle}" x2="{last}" y2="{middle}"'
        yield f'<line {ends} stroke="{INK}" stroke-width="1.5"/>'
    shown = f"{least:.2f}" if least == most else f"{least:.2f} to {most:.2f}"
    yield _text(max(end, last) + 4, y + 13, shown, size=11)


def _left(index: int) -> int:
    return LABELS + index * (PANEL + GAP)


def _x(index: int, ratio: float) -> float:
    """Where a ratio stands in a panel."""
    return round(_left(index) + (ratio - LEAST) / (MOST - LEAST) * (PANEL - NUMBER), 1)


def _text(x: float, y: float, text: str, *, size: int = 12, bold: bool = False, ink: str = INK) -> str:
    weight = ' font-weight="600"' if bold else ""
    return f'<text x="{x}" y="{y}" font-size="{size}"{weight} fill="{ink}">{escape(text)}</text>'


def main() -> None:
    """Write the figure."""
    FIGURE.write_text(draw(runs()), encoding="utf-8")
    print(f"wrote {FIGURE}")


if __name__ == "__main__":
    main()
