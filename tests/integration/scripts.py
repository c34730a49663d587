"""What scripts that run in a process of a test have in common."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path


def run_given(run_case: Callable[..., object]) -> None:
    """Call it with what one JSON file holds, and write what it returns to another: ``python SCRIPT GIVEN FOUND``."""
    given, wanted = map(Path, sys.argv[1:])
    wanted.write_text(json.dumps(run_case(**json.loads(given.read_text()))))
