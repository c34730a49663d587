"""What several tests look at is made once."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from typing import Any


def once(function: Callable[..., Any]) -> Callable[..., Any]:
    """`functools.cache` that also remembers an error: engines that failed do not run again for each test of theirs."""
    found: dict[tuple[Hashable, ...], tuple[Any, Exception | None]] = {}

    @functools.wraps(function)
    def call(*arguments: Hashable) -> Any:
        if arguments not in found:
            try:
                found[arguments] = function(*arguments), None
            except Exception as error:  # noqa: BLE001 - whatever it is, it is raised below
                found[arguments] = None, error
        value, error = found[arguments]
        if error is not None:
            raise error
        return value

    return call
