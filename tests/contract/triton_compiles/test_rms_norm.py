"""RMSNorm compiles for each GPU."""

from __future__ import annotations

import pytest

from atom_core.kernels.rms_norm import triton_kernel as norm_kernel
from tests.contract.triton_compiles.compiling import compiles, every_gpu, zeros


@every_gpu
@pytest.mark.parametrize("size", [128, 4096, 16384])
@pytest.mark.parametrize("adds", [False, True], ids=["alone", "with a residual"])
def test_rms_norm_compiles(adds, size, gpu):
    residual = zeros(2, size) if adds else None
    with compiles(norm_kernel, "_rms_norm", gpu):
        norm_kernel.rms_norm(zeros(2, size), zeros(size), 1e-6, residual, overlap=gpu.nvidia)
