"""RMSNorm compiles for each GPU."""

from __future__ import annotations

import pytest

from atom_core.kernels.rms_norm import triton_kernel as norm_kernel
from tests.contract.triton_compiles.compiling import Launched, Recorder, compile_launch, every_gpu, zeros


@every_gpu
@pytest.mark.parametrize("size", [128, 4096, 16384])
@pytest.mark.parametrize("adds", [False, True], ids=["alone", "with a residual"])
def test_rms_norm_compiles(monkeypatch, adds, size, gpu):
    kernel = norm_kernel._rms_norm
    monkeypatch.setattr(norm_kernel, "_rms_norm", Recorder())
    residual = zeros(2, size) if adds else None
    with pytest.raises(Launched) as launched:
        norm_kernel.rms_norm(zeros(2, size), zeros(size), 1e-6, residual, overlap=gpu.nvidia)
    compile_launch(kernel, launched.value, gpu)
