"""Trained DeepSeek checkpoints: what they answer right, and how often drafts of the layer that one has are right."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.integration.questions import checkpoint

#: Of drafts that are right, between engines, and between them and the score of training.
TOLERANCE = 0.02
#: The least that must be right of first drafts.
RIGHT = 0.7


def score(family: str) -> dict[str, Any]:
    """What Hugging Face's model of the checkpoint has scored, after training."""
    found: dict[str, Any] = json.loads(Path(checkpoint(family), "score.json").read_text())
    return found
