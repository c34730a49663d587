"""What each test here compiles for AMD is compared with what was kept; compiled code is cached."""

from __future__ import annotations

import os
from dataclasses import astuple

import pytest
import triton

from benchmarks.amd_kernels import PAGE, PROPERTY, page_rows, page_version, rows_of
from tests.contract.triton_compiles.compiling import COMPILED


@pytest.fixture(autouse=True)
def as_the_page_says(request, record_property):
    """Have docs/amd-kernels.md say of what a test compiles what comes out, with the Triton that it was written with."""
    COMPILED.clear()
    yield
    found = list(rows_of(request.node.name, COMPILED)) if COMPILED else []
    for row in found:
        record_property(PROPERTY, astuple(row))
    text = PAGE.read_text(encoding="utf-8")
    if page_version(text) == triton.__version__:
        assert set(found) <= page_rows(text), "docs/amd-kernels.md is out of date: python -m benchmarks.amd_kernels"


@pytest.fixture(autouse=True, scope="session")
def cache(tmp_path_factory):
    """What several launches have in common is compiled once.

    TRITON_CACHE_DIR names a cache that is kept. Triton finds in it what it has compiled for the same target from the
    same source, with all that it calls, by the same Triton: it is what compiling it once more would give.
    """
    with pytest.MonkeyPatch.context() as patch:
        if "TRITON_CACHE_DIR" not in os.environ:
            patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        yield
