"""Gated activations compile for each GPU."""

from __future__ import annotations

import pytest

from atom_core.kernels.gated_activation import triton_kernel as activation_kernel
from tests.contract.triton_compiles.compiling import compiles, every_gpu, zeros


@every_gpu
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "clamped_swiglu"])
def test_gated_activation_compiles(activation, gpu):
    with compiles(activation_kernel, "_gated_activation", gpu):
        activation_kernel.gated_activation(zeros(2, 6144), activation, gpu.nvidia)
