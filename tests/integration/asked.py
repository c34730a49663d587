"""Which cases the tests of a run ask for, so that a fixture starts the engines of these alone."""

from __future__ import annotations

from typing import Any

import pytest


def cases_asked_for(request: pytest.FixtureRequest) -> list[Any]:
    """What ``case`` is in the tests of this module that use the fixture, each once."""
    items = [it for it in request.session.items if isinstance(it, pytest.Function) and it.path == request.path]
    return list(dict.fromkeys(it.callspec.params["case"] for it in items if request.fixturename in it.fixturenames))
