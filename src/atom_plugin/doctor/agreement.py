"""The table of `atom-plugin check`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table

if TYPE_CHECKING:
    from atom_core.check import Report


def stage_table(result: Report) -> Table:
    """The difference between the two models, one row for each stage."""
    dtype = str(result.dtype).removeprefix("torch.")
    table = Table(title=f"{result.directory}: {result.num_tokens} tokens, {dtype}", title_justify="left")
    table.add_column("After")
    for heading in ("Largest difference", "Spread", "Share of it"):
        table.add_column(heading, justify="right")
    table.add_column("Within tolerance")
    for stage in result.stages:
        table.add_row(
            stage.name,
            f"{stage.difference:.2e}",
            f"{stage.spread:.3g}",
            f"{stage.relative:.1e}",
            "yes" if stage.relative <= result.tolerance else "NO",
        )
    return table
