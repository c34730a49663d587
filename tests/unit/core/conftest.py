"""What must be settled before anything is imported.

Triton's interpreter, which runs kernels on a CPU: the choice is made when `triton` is first imported, and never again.
One thread: models of these sizes run several times faster than on two.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.thorough import mark_thorough

os.environ["TRITON_INTERPRET"] = "1"

import torch

torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Which of a test's cases are examples."""
    mark_thorough(items, Path(__file__).parent)


@pytest.fixture(autouse=True)
def seeded() -> None:
    """The same random numbers whichever tests ran before in this process."""
    torch.manual_seed(0)
