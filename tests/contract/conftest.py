"""What is collected here, and what of it always runs.

The contracts with vLLM are for an environment that has it; named on the command line elsewhere, nothing is found.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.thorough import mark_thorough

collect_ignore = [] if importlib.util.find_spec("vllm") else ["vllm"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Which of a test's cases are examples."""
    mark_thorough(items, Path(__file__).parent)
