"""What tests of vLLM's interfaces share."""

from __future__ import annotations

import pytest

from tests.integration.vllm.inspected import inspect_all


@pytest.fixture(scope="session", autouse=True)
def inspected() -> None:
    """vLLM's own classes are looked at once."""
    inspect_all()
