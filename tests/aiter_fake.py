"""Our kernels over the aiter of tests/fakes, on a CPU: it is importable inside, and nowhere else."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

FAKES = Path(__file__).parent / "fakes"
ARCHITECTURES = ("gfx942", "gfx950")


@contextmanager
def fake_aiter(arch: str) -> Iterator[ModuleType]:
    """The fake, as on a GPU of ``arch``."""
    own = [name for name in sys.modules if name == "aiter" or name.startswith("aiter.")]
    assert not own, "another aiter is imported already"
    try:
        with mock.patch.dict(os.environ, GPU_ARCHS=arch), mock.patch.object(sys, "path", [str(FAKES), *sys.path]):
            importlib.invalidate_caches()
            yield importlib.import_module("aiter")
    finally:
        for name in list(sys.modules):
            if name == "aiter" or name.startswith("aiter."):
                del sys.modules[name]
        importlib.invalidate_caches()


def calls() -> list[Any]:
    """The calls that the fake has seen, the latest last; may be cleared."""
    seen: list[Any] = sys.modules["aiter._recorded"].CALLS
    return seen
