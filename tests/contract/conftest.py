"""What is collected here, and what of it always runs.

The contracts with vLLM and with SGLang are for environments that have them; elsewhere they are not collected.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.thorough import mark_thorough

collect_ignore = [it for it in ("sglang", "vllm") if not importlib.util.find_spec(it)]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Which of a test's cases are examples."""
    mark_thorough(items, Path(__file__).parent)
