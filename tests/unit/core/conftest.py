"""What must be settled before anything is imported.

Triton's interpreter, which runs kernels on a CPU: the choice is made when `triton` is first imported, and never again.
One thread: models of these sizes run several times faster than on two.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from tests.thorough import mark_thorough

os.environ["TRITON_INTERPRET"] = "1"

import torch

from tests import quick_interpreter

torch.set_num_threads(1)
quick_interpreter.install()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Which of a test's cases are examples."""
    mark_thorough(items, Path(__file__).parent)


@pytest.fixture(autouse=True)
def seeded() -> None:
    """The same random numbers whichever tests ran before in this process."""
    torch.manual_seed(0)


@pytest.fixture
def exact_fp8_casts(monkeypatch):
    """torch's casts between float32, float16 and FP8 in the interpreter.

    Its own, as of Triton 3.9, lose the carry where rounding moves a number to the next power of two, and make numbers
    of FP8's NaN. A GPU's do neither.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    dtypes = {
        tl.float32: torch.float32,
        tl.float16: torch.float16,
        tl.float8e4nv: torch.float8_e4m3fn,
        tl.float8e5: torch.float8_e5m2,
        tl.float8e4b8: torch.float8_e4m3fnuz,
    }
    own = interpreter._convert_float

    def convert(data, source, target, rounding):
        if source not in dtypes or target not in dtypes:
            return own(data, source, target, rounding)
        bits = np.ascontiguousarray(data).view(f"uint{source.primitive_bitwidth}")
        found = torch.from_numpy(bits).view(dtypes[source]).to(dtypes[target])
        unsigned = {8: torch.uint8, 16: torch.uint16, 32: torch.uint32}[target.primitive_bitwidth]
        return found.view(unsigned).numpy()

    monkeypatch.setattr(interpreter, "_convert_float", convert)
