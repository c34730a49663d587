"""What becomes of each setting of a framework: who acts on it, and what our models refuse.

Each adapter has one table of these rows (``flags.py`` beside its ``routing.py``). A setting is a field of one of the
framework's configuration classes (``SchedulerConfig.max_num_seqs``, ``ServerArgs.enable_lora``) or an environment
variable (``VLLM_BATCH_INVARIANT``). Every setting of every supported version stands in exactly one row, which a test
compares with the installed framework: a new flag is looked at before it is served. ``routing`` refuses by the table,
and the documentation and ``atom-plugin doctor`` are made from it. A table imports no framework.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Theirs:
    """Settings that act outside the model's code, so that they mean with our models what they mean with native ones."""

    why: str
    """Where they act, and so why we need do nothing."""
    settings: tuple[str, ...]


@dataclass(frozen=True)
class Ours:
    """Settings that native models act on inside their code, and that our models honour."""

    how: str
    """What our models do with them."""
    test: str
    """The test that compares them with the native model or with what they promise: ``path::name`` in the checkout."""
    settings: tuple[str, ...]


@dataclass(frozen=True)
class Refused:
    """A setting that asks for what our models cannot do, but for the values that it may have."""

    setting: str
    what: str
    """What is asked for, as in "atom-plugin does not support ..."."""
    flags: tuple[str, ...] = ()
    """How a user gives it on the command line, each spelling; none for a variable."""
    allowed: tuple[str, ...] = ()
    """The values that are served, as a user writes them; where there are none, the unset setting alone is."""
    instead: str = ""
    """What to use in its place, as a sentence; by default, to leave our models out."""
    refuses: Callable[[Any], bool] | None = None
    """Whether a value of the field is refused; by default, one that is set and not in :attr:`allowed`."""
    unless: str = ""
    """A variable of ours that, set to 1, has the framework's own code act on the setting."""
    as_given: bool = False
    """Whether the framework chooses a value too, which our models leave aside, so that only the user's own counts."""
    beside: Callable[[Any], bool] | None = None
    """With which other settings it is refused, of the configuration as the user gave it; by default, with all."""

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
            # A field that no flag sets is known to users by what it asks for.
            given = "" if "." in self.setting else f" ({self.setting}={int(value) if value is True else value})"
        return f"atom-plugin does not support {self.what}{given}{self.supported()}. {self.instead or otherwise}"

    def supported(self) -> str:
        """What a message says of the values that are served."""
        return f"; supported: {', '.join(self.allowed)}" if self.allowed else ""

    def is_refused_on_the_command_line(self, flag: str, text: str) -> bool:
        """The same as :meth:`is_refused` where only what stands behind a flag is known, maybe nothing."""
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
        AssertionError: one stands in more than one row.
    """
    names = Counter(name for row in table for name in ((row.setting,) if isinstance(row, Refused) else row.settings))
    assert not (twice := [name for name, count in names.items() if count > 1]), f"more than one row: {twice}"
    return tuple(names)


def refusals(table: Sequence[Row]) -> Iterator[Refused]:
    """What a table refuses, in its order."""
    return (row for row in table if isinstance(row, Refused))


def owner_of(setting: str) -> str:
    """The class of a field; nothing for a variable."""
    return setting.rpartition(".")[0]


def counts(table: Sequence[Row]) -> Counter[str]:
    """How many settings are the framework's, ours and refused, by the name of the kind of row."""
    return Counter({kind: sum(_size(row) for row in table if type(row).__name__ == kind) for kind in KINDS})


def _size(row: Row) -> int:
    return 1 if isinstance(row, Refused) else len(row.settings)


#: Kinds of rows, in the order in which pages have them.
KINDS = ("Theirs", "Ours", "Refused")
