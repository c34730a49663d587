"""The tables of flags as Markdown, as a table for a terminal and as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from atom_plugin.common.flags import KINDS, Ours, Refused, Row, Theirs, counts, refusals

if TYPE_CHECKING:
    from rich.table import Table as RichTable

_TITLES = {"Theirs": "the framework's own, outside of models", "Ours": "honoured", "Refused": "refused by name"}
_REFUSED = ("Flag or variable", "Refused", "Served", "In its place")
_HONOURED = ("Settings", "With our models")


def as_markdown(table: Sequence[Row]) -> str:
    """For a page: counts, refused settings, honoured settings, and the reasons of all others."""
    found = counts(table)
    total = ", ".join(f"{found[kind]} are {_TITLES[kind]}" for kind in KINDS)
    refused = [(_names(row), row.what, ", ".join(_code(row.allowed)), row.instead) for row in refusals(table)]
    honoured = [(", ".join(_code(row.settings)), row.how) for row in table if isinstance(row, Ours)]
    theirs = [f"- {row.why}: {len(row.settings)}\n" for row in table if isinstance(row, Theirs)]
    return (
        f"Of {sum(found.values())} settings {total}.\n\n"
        + _markdown(_REFUSED, _merged(refused))
        + "\n"
        + _markdown(_HONOURED, honoured)
        + "\nThe framework's own settings, by what they concern:\n\n"
        + "".join(theirs)
    )


def as_table(table: Sequence[Row]) -> RichTable:
    """For a terminal: the refused and the honoured settings."""
    from rich.table import Table as RichTable

    shown = RichTable("Setting", "With our models")
    for row in table:
        if isinstance(row, Refused):
            shown.add_row(", ".join(row.flags or (row.setting,)), f"refused: {row.what}{row.supported()}")
        elif isinstance(row, Ours):
            shown.add_row("\n".join(row.settings), row.how)
    found = counts(table)
    shown.caption = ", ".join(f"{found[kind]} {_TITLES[kind]}" for kind in KINDS)
    return shown


def as_json(table: Sequence[Row]) -> str:
    """For a program: one object for each setting."""
    return json.dumps([entry for row in table for entry in _objects(row)], indent=2)


def _objects(row: Row) -> Iterable[dict[str, Any]]:
    if isinstance(row, Refused):
        flags, allowed = list(row.flags), list(row.allowed)
        yield {"setting": row.setting, "kind": "refused", "flags": flags, "what": row.what, "allowed": allowed}
        return
    for setting in row.settings:
        if isinstance(row, Ours):
            yield {"setting": setting, "kind": "ours", "how": row.how, "test": row.test}
        else:
            yield {"setting": setting, "kind": "theirs", "why": row.why}


def _names(row: Refused) -> str:
    return ", ".join(_code(row.flags or (row.setting,)))


def _code(names: Iterable[str]) -> list[str]:
    return [f"`{name}`" for name in names]


def _merged(rows: Iterable[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """One line for rows that differ only in their first cell."""
    merged: dict[tuple[str, ...], list[str]] = {}
    for first, *rest in rows:
        merged.setdefault(tuple(rest), []).append(first)
    return [(", ".join(dict.fromkeys(names)), *rest) for rest, names in merged.items()]


def _markdown(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return "".join(f"| {' | '.join(line)} |\n" for line in (headings, ["---"] * len(headings), *rows))
