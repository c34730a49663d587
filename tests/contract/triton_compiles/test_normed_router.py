"""A norm with the router behind it compiles for each GPU."""

from __future__ import annotations

import re

import pytest
import torch

from atom_core.kernels.fp8_inputs import InputForm
from atom_core.kernels.fp8_linear.scaled_mm import dtype_of
from atom_core.kernels.normed_linear import Operands
from atom_core.kernels.normed_router import triton_kernel as normed_router_kernel
from tests.contract.triton_compiles.compiling import compiles, every_gpu, zeros


@every_gpu
@pytest.mark.parametrize("tokens", [2, 16])
@pytest.mark.parametrize(
    ("num_experts", "hidden", "wide"),
    [(128, 2048, False), (32, 2880, False), (256, 7168, False), (128, 4096, True), (528, 2048, False)],
)
def test_norm_and_router_compile(num_experts, hidden, wide, tokens, gpu):
    weight = torch.zeros(num_experts, hidden) if wide else zeros(num_experts, hidden)
    router = Operands(weight, zeros(num_experts), float32_result=not wide)
    with compiles(normed_router_kernel, "_norm_and_score", gpu) as found:
        normed_router_kernel.TritonNormedRouter(gpu.nvidia)(zeros(tokens, hidden), zeros(hidden), 1e-6, router)
    if gpu.nvidia:
        # The token is read 16 bytes at a time; a program's own few columns, their norm's and its rows' biases are not.
        narrow = len(re.findall(r"ld\.global\S*\.b16\b", found.compiled.asm["ptx"]))
        assert narrow <= 2 + found.launched.constants["ROWS"]


@every_gpu
@pytest.mark.parametrize(("num_outputs", "hidden"), [(64, 2048), (96, 5120), (16, 2048)])
@pytest.mark.parametrize("tokens", [2, 16])
def test_norm_and_gates_that_quantise_compile(num_outputs, hidden, tokens, gpu):
    gates = Operands(zeros(num_outputs, hidden), None)
    form = InputForm(dtype_of(gpu.device), group=128)
    with compiles(normed_router_kernel, "_norm_and_score", gpu):
        kernel = normed_router_kernel.TritonNormedRouter(gpu.nvidia)
        kernel.quantized(zeros(tokens, hidden), zeros(hidden), 1e-6, gates, form)
