"""The gated sum compiles for each GPU."""

from __future__ import annotations

from atom_core.kernels.gated_sum import triton_kernel as sum_kernel
from tests.contract.triton_compiles.compiling import compiles, every_gpu, zeros


@every_gpu
def test_gated_sum_compiles(gpu):
    with compiles(sum_kernel, "_gated_sum", gpu):
        sum_kernel.gated_sum(zeros(2, 2048), zeros(2, 2048), zeros(2, 528)[:, 512, None], gpu.nvidia)
