"""Gated activations compile for each GPU."""

from __future__ import annotations

import pytest

from atom_core.kernels.gated_activation import triton_kernel as activation_kernel
from tests.contract.triton_compiles.compiling import Launched, Recorder, compile_launch, every_gpu, zeros


@every_gpu
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "clamped_swiglu"])
def test_gated_activation_compiles(monkeypatch, activation, gpu):
    kernel = activation_kernel._gated_activation
    monkeypatch.setattr(activation_kernel, "_gated_activation", Recorder())
    with pytest.raises(Launched) as launched:
        activation_kernel.gated_activation(zeros(2, 6144), activation, gpu.nvidia)
    compile_launch(kernel, launched.value, gpu)
