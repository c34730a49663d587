"""One file a public report: what is changed in a sound checkpoint, and what is right.

    {"report": "...", "family": "Qwen3", "config": {"key": "value"}, "refused": "what the one line says, or null"}

A case that is not refused is served as Transformers serves it. The next report is one file more.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Case:
    """See the module's text."""

    name: str
    report: str
    family: str
    """As checkpoints spell the architecture, without its end."""
    config: dict[str, Any]
    refused: str | None

    def __str__(self) -> str:
        return self.name

    def change(self, folder: Path) -> None:
        """Make it of the sound checkpoint in `folder`."""
        path = folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **self.config}))


def read_cases() -> list[Case]:
    """All of them."""
    return [Case(path.stem, **json.loads(path.read_text())) for path in sorted(Path(__file__).parent.glob("*.json"))]
