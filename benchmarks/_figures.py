"""Medians, spreads and ratios of native and atom engines that were measured in turns, as a table and a plot."""

from __future__ import annotations

import importlib.util
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks import IMPLEMENTATIONS

#: By figure and implementation, one value per round; both values of a round were measured directly after each other.
Rounds = Mapping[str, Mapping[str, Sequence[float]]]

#: Figures where more is better; for all others less is better.
MORE_IS_BETTER = ("cache tokens", "output tokens a second")


@dataclass(frozen=True)
class Spread:
    """One engine's values over all rounds."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """The values' median, minimum and maximum."""
        return cls(statistics.median(values), min(values), max(values))


@dataclass(frozen=True)
class Row:
    """One figure of both engines; a ratio above 1 is in atom's favour."""

    figure: str
    native: Spread
    atom: Spread
    ratio: float
    least_ratio: float
    most_ratio: float
    floor: float | None = None
    """The minimum possible value."""

    @property
    def share(self) -> float | None:
        """The floor as a share of atom's value."""
        return None if self.floor is None else self.floor / self.atom.median


def summarise(rounds: Rounds, floors: Mapping[str, float | None] | None = None) -> list[Row]:
    """A row per figure; the ratio is the median of the rounds' ratios."""
    rows = []
    for figure, values in rounds.items():
        pairs = list(zip(*(values[name] for name in IMPLEMENTATIONS), strict=True))
        more = figure.endswith(MORE_IS_BETTER)
        ratios = [atom / native if more else native / atom for native, atom in pairs]
        spreads = [Spread.of(values[name]) for name in IMPLEMENTATIONS]
        floor = (floors or {}).get(figure)
        rows.append(Row(figure, *spreads, statistics.median(ratios), min(ratios), max(ratios), floor))
    return rows


def markdown(rows: Sequence[Row]) -> str:
    """The table of a page."""
    lines = [
        "| figure | native | atom | ratio | floor | of the floor |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        floor = "" if row.floor is None else f"{row.floor:.4g}"
        share = "" if row.share is None else f"{row.share:.0%}"
        lines.append(
            f"| {row.figure} | {_spread(row.native)} | {_spread(row.atom)} | {_ratio(row)} | {floor} | {share} |"
        )
    return "\n".join(lines) + "\n"


def as_json(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """The rows for a file."""
    return [{**asdict(row), "share_of_floor": row.share} for row in rows]


def require_matplotlib() -> None:
    """Check before anything is measured that plots can be drawn.

    Raises:
        SystemExit: matplotlib is missing.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise SystemExit("matplotlib is not installed: `pip install matplotlib`, or pass --no-plot.")


def plot(rows: Sequence[Row], path: Path, title: str) -> None:
    """A PNG with bars for both engines, with spread and floor; each figure is scaled by its native median."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(max(6.0, 1.1 * len(rows)), 4.8))
    for offset, name in ((-0.2, "native"), (0.2, "atom")):
        spreads: list[Spread] = [getattr(row, name) for row in rows]
        scales = [row.native.median for row in rows]
        heights = [it.median / scale for it, scale in zip(spreads, scales, strict=True)]
        errors = [
            [(it.median - it.least) / scale for it, scale in zip(spreads, scales, strict=True)],
            [(it.most - it.median) / scale for it, scale in zip(spreads, scales, strict=True)],
        ]
        axes.bar([index + offset for index in range(len(rows))], heights, 0.38, yerr=errors, capsize=3, label=name)
    floors = [(index, row.floor / row.native.median) for index, row in enumerate(rows) if row.floor is not None]
    for number, (index, height) in enumerate(floors):
        label = "floor" if number == 0 else None
        axes.hlines(height, index - 0.4, index + 0.4, colors="black", linestyles="dashed", label=label)
    axes.set_xticks(range(len(rows)), [row.figure for row in rows], rotation=30, ha="right", fontsize=8)
    axes.set_ylabel("share of native's median")
    axes.set_title(title, fontsize=10)
    axes.legend(loc="upper right", bbox_to_anchor=(1.0, 1.0), framealpha=0.9)
    axes.set_ylim(top=1.25 * axes.get_ylim()[1])
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _spread(it: Spread) -> str:
    if it.least == it.most:
        return f"{it.median:.4g}"
    return f"{it.median:.4g} ({it.least:.4g} to {it.most:.4g})"


def _ratio(row: Row) -> str:
    if row.least_ratio == row.most_ratio:
        return f"{row.ratio:.3f}"
    return f"{row.ratio:.3f} ({row.least_ratio:.2f} to {row.most_ratio:.2f})"
