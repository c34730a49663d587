"""The output gate of attention compiles for each GPU."""

from __future__ import annotations

import pytest

from atom_core.kernels.output_gate import triton_kernel as gate_kernel
from tests.contract.triton_compiles.compiling import compiles, every_gpu, zeros


@every_gpu
@pytest.mark.parametrize(("heads", "dim"), [(16, 256), (3, 40)])
def test_output_gate_compiles(heads, dim, gpu):
    size = heads * dim
    with compiles(gate_kernel, "_multiply_by_gate", gpu):
        # The gate lies behind q, k and v.
        gate_kernel.multiply_by_gate(zeros(2, heads, dim), zeros(2, 3 * size)[:, 2 * size :], gpu.nvidia)
