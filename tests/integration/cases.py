"""The public reports of `tests/cases` as configurations that a framework is started with, without weights."""

from __future__ import annotations

from pathlib import Path

from tests.cases import Case, read_cases
from tests.unit.core.families import ALL_FAMILIES
from tests.unit.core.hugging_face import make_config

#: Reports of what only weights show: another head, and a count of which Transformers' object keeps one of two names.
_OF_WEIGHTS = ("tied-by-config-another-head-in-the-file", "two-counts-of-experts")
CASES = [case for case in read_cases() if case.name not in _OF_WEIGHTS]


def make(folder: Path, case: Case) -> Path:
    """The folder of a case."""
    (family,) = (family for family in ALL_FAMILIES if str(family) == case.family)
    place = folder / case.name
    make_config(family, max_position_embeddings=256).save_pretrained(place)
    case.change(place)
    return place


def is_right(case: Case, message: str | None) -> bool:
    """Whether this is what should be said of it: nothing, or the refusal; the framework itself may refuse before us."""
    if case.refused is None:
        return message is None
    if message is None:
        return False
    # Transformers gives some files another model_type than they have.
    return any(it in message for it in (case.refused, "which are different models")) or "model's config" not in message
