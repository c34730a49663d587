"""What of a file's cases a run has selected, so that no engine is started for the others."""

from __future__ import annotations

import pytest


def selected(request: pytest.FixtureRequest, parameter: str) -> set[str]:
    """The values of ``parameter`` in the tests of the requesting file that run."""
    items = (item for item in request.session.items if item.path == request.path)
    return {item.callspec.params[parameter] for item in items if isinstance(item, pytest.Function)}
