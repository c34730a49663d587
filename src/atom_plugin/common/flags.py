"""The rows of the tables of a framework's settings: its own, those that our models honour, and those that they refuse.

Each adapter has one table (``flags.py``). A setting is a field of one of the framework's configuration classes
(``SchedulerConfig.max_num_seqs``, ``ServerArgs.enable_lora``) or an environment variable (``VLLM_BATCH_INVARIANT``).
Every setting of every supported version is in exactly one row. A test compares the table with the installed framework,
so that a new setting is reviewed before it is supported. ``routing.py`` refuses by the table, and the documentation and
``atom-plugin doctor`` are made from it. A table imports no framework.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Theirs:
    """Settings that act outside the model's code, and so do the same with our models as with native ones."""

    why: str
    """Where they act."""
    settings: tuple[str, ...]


@dataclass(frozen=True)
class Ours:
    """Settings that native models read in their own code, and that our models honour."""

    how: str
    """What our models do with them."""
    test: str
    """The test that our models honour them, as ``path::name`` in the repository."""
    settings: tuple[str, ...]


@dataclass(frozen=True)
class Refused:
    """A setting that asks for something that our models do not support, except at some values."""

    setting: str
    what: str
    """What is asked for, as in "atom-plugin does not support ..."."""
    flags: tuple[str, ...] = ()
    """All spellings of its flag; empty for a variable."""
    allowed: tuple[str, ...] = ()
    """The supported values, as a user writes them; if empty, the setting must be unset."""
    instead: str = ""
    """What to do instead, as a sentence; by default, to leave our models out."""
    refuses: Callable[[Any], bool] | None = None
    """Whether a value of the field is refused; by default, one that is set and not in :attr:`allowed`."""
    unless: str = ""
    """One of our variables that, set to 1, lets the framework's own code act on the setting."""
    as_given: bool = False
    """Whether only the user's value counts, because the framework sets the field itself and our models ignore that."""
    only_if: Callable[[Any], bool] | None = None
    """Whether it is refused with the other settings, which are given as the user set them; by default, always."""

    def is_refused(self, value: Any) -> bool:
        """Whether our models refuse the setting at ``value``, a field of the framework's configuration."""
        if self.refuses is not None:
            return self.refuses(value)
        return bool(value) and str(value) not in self.allowed

    def message(self, value: Any, otherwise: str) -> str:
        """Flag, value, what is supported and what to do, in one line.

        Args:
            value: of the setting.
            otherwise: how to leave our models out, as in "Leave --model-impl out to use it."
        """
        if self.flags:
            given = f" ({self.flags[0]})" if isinstance(value, bool) else f" ({self.flags[0]} {value})"
        else:
            # Users do not know a field without a flag by its name.
            given = "" if "." in self.setting else f" ({self.setting}={int(value) if value is True else value})"
        return f"atom-plugin does not support {self.what}{given}{self.supported()}. {self.instead or otherwise}"

    def supported(self) -> str:
        """The supported values, as a part of a message."""
        return f"; supported: {', '.join(self.allowed)}" if self.allowed else ""

    def is_refused_on_the_command_line(self, flag: str, text: str) -> bool:
        """The same as :meth:`is_refused` for the text after a flag, which may be empty."""
        if text in self.allowed:
            return False
        if not text:
            return self.is_refused(not flag.startswith("--no-"))
        try:
            value = json.loads(text.lower() if text.lower() in ("true", "false") else text)
        except ValueError:
            value = text
        return self.is_refused(value)


Row = Theirs | Ours | Refused


def settings_of(owner: str, names: str) -> tuple[str, ...]:
    """``names``, separated by white space, as fields of the class ``owner``; as variables where ``owner`` is empty."""
    return tuple(f"{owner}.{name}" if owner else name for name in names.split())


def listed(table: Sequence[Row]) -> tuple[str, ...]:
    """Every setting of a table.

    Raises:
        AssertionError: a setting is in more than one row.
    """
    names = Counter(name for row in table for name in ((row.setting,) if isinstance(row, Refused) else row.settings))
    assert not (twice := [name for name, count in names.items() if count > 1]), f"more than one row: {twice}"
    return tuple(names)


def refusals(table: Sequence[Row]) -> Iterator[Refused]:
    """The rows of a table that refuse a setting, in order."""
    return (row for row in table if isinstance(row, Refused))


def owner_of(setting: str) -> str:
    """The class of a field; empty for a variable."""
    return setting.rpartition(".")[0]


def counts(table: Sequence[Row]) -> Counter[str]:
    """The number of settings by the name of their kind of row."""
    return Counter({kind: sum(_size(row) for row in table if type(row).__name__ == kind) for kind in KINDS})


def _size(row: Row) -> int:
    return 1 if isinstance(row, Refused) else len(row.settings)


#: Kinds of rows, in the order of the documentation.
KINDS = ("Theirs", "Ours", "Refused")
