"""What each test here compiles for AMD is compared with what was written of it; compiled code is cached.

After a change of a kernel: ``python -m benchmarks.amd_kernels``.
"""

from __future__ import annotations

import os

import pytest
import triton

from benchmarks.amd_kernels import FIXTURE, PROPERTY, Compiled, by_kernel, handed_over
from tests.contract.triton_compiles.compiling import COMPILED


@pytest.fixture(scope="session")
def written():
    """What FIXTURE has."""
    return Compiled.read(FIXTURE.read_text(encoding="utf-8"))


@pytest.fixture(autouse=True)
def as_written(request, record_property, written):
    """Have a test compile for AMD what FIXTURE says, with the Triton that it was written with."""
    COMPILED.clear()
    yield
    compiled = by_kernel(COMPILED)
    if compiled:
        record_property(PROPERTY, handed_over(compiled))
    if written.triton == triton.__version__:
        expected = written.of(request.node.name)
        assert compiled == expected, f"{FIXTURE.name} is out of date: python -m benchmarks.amd_kernels"


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
