"""The result of a check."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """Something that prevents our models from running: the problem, its consequence, what to change."""

    problem: str
    consequence: str
    remedy: str
