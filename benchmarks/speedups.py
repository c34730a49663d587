"""Draws docs/figures/speedups.svg, the README's figure, from the ratios in docs/figures/speedups.json.

    python -m benchmarks.speedups

One panel a number of requests, one row a model. A bar goes from 1, where both are as fast, to the ratio; of several
measurements it goes to the least, and a line shows their range. Rows with a footnote have pale bars: native lacked
something there that its users have. The SVG is written as text, so that equal ratios give equal files.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

FIGURES = Path(__file__).parents[1] / "docs" / "figures"
RATIOS, FIGURE = FIGURES / "speedups.json", FIGURES / "speedups.svg"

#: Pixels: the labels' column, a panel and the gap behind it, a row, and the head and foot of the figure.
LABELS, PANEL, GAP, ROW, HEAD, NOTE = 310, 150, 18, 19, 84, 17
#: The ratios at the two ends of a panel; the rest of its width is for the number behind a bar.
LEAST, MOST, NUMBER = 0.8, 1.9, 42
INK, PALE_INK, SLOWER = "#1f2937", "#6b7280", "#b91c1c"
BAR, PALE_BAR = "#2563eb", "#a9c4f5"
MARKS = {"1": "¹", "2": "²", "3": "³"}


def draw(figure: Mapping[str, Any]) -> str:
    """The SVG of a file of ratios.

    Args:
        figure: ``title``, ``subtitle``, ``requests`` (the panels), ``notes`` by number, and ``groups`` of rows with a
            ``model``, its ``ratios`` by number of requests (one, or the least and the most) and perhaps a ``note``.

    Raises:
        ValueError: a ratio that no panel can show, or a note that is not among ``notes``.
    """
    panels: Sequence[str] = figure["requests"]
    width = LABELS + len(panels) * (PANEL + GAP)
    body, y = [], HEAD
    for group in figure["groups"]:
        body.append(_text(12, y + 14, group["title"], bold=True))
        y += ROW + 4
        for row in group["rows"]:
            body += _row(row, figure, y)
            y += ROW
        y += 8
    axes = [line for index, name in enumerate(panels) for line in _axis(index, name, y)]
    notes = [
        _text(12, y + 18 + NOTE * index, f"{MARKS[number]} {text}", size=11, ink=PALE_INK)
        for index, (number, text) in enumerate(figure["notes"].items())
    ]
    height = y + 18 + NOTE * len(notes)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'font-family="system-ui, sans-serif" role="img">',
        f"<title>{escape(figure['title'])}</title>",
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        _text(12, 24, figure["title"], size=16, bold=True),
        _text(12, 43, figure["subtitle"], ink=PALE_INK),
        *axes,
        *body,
        *notes,
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def _axis(index: int, name: str, bottom: int) -> Iterator[str]:
    """A panel's heading, and the line where both are as fast."""
    yield _text(_left(index), HEAD - 16, f"{name} request{'' if name == '1' else 's'} at once", bold=True)
    x = _x(index, 1.0)
    yield f'<line x1="{x}" y1="{HEAD - 6}" x2="{x}" y2="{bottom - 4}" stroke="#9ca3af"/>'


def _row(row: Mapping[str, Any], figure: Mapping[str, Any], y: int) -> Iterator[str]:
    """A model's name, and its bar in each panel."""
    note = row.get("note")
    if note is not None and note not in figure["notes"]:
        raise ValueError(f"{row['model']} has the note {note!r}; there are {', '.join(figure['notes'])}.")
    yield _text(24, y + 13, row["model"] + (f" {MARKS[note]}" if note else ""))
    for index, requests in enumerate(figure["requests"]):
        yield from _bar(index, row["ratios"][requests], y, pale=note is not None)


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
    FIGURE.write_text(draw(json.loads(RATIOS.read_text(encoding="utf-8"))), encoding="utf-8")
    print(f"wrote {FIGURE}")


if __name__ == "__main__":
    main()
