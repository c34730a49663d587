"""What a check of the doctor's reports."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """Something that keeps our models from running: what is so, what will happen, what to change."""

    problem: str
    consequence: str
    remedy: str
