"""The result of a check."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """Something that prevents our models from running: the problem, its consequence, what to change."""

    problem: str
    consequence: str
    remedy: str

    @classmethod
    def of(cls, reason: str, consequence: str, otherwise: str) -> Finding:
        """A server's line, whose last sentence says what to change; ``otherwise`` does where it is the only one."""
        problem, _, remedy = reason.rpartition(". ")
        return cls(f"{problem}.", consequence, remedy) if problem else cls(reason, consequence, otherwise)
