"""The gates and the gated norm of Gated DeltaNet compile for each GPU."""

from __future__ import annotations

import pytest
import torch

from atom_core.kernels.gated_delta_net import gates_and_norm
from tests.contract.triton_compiles.compiling import compiles, every_gpu, zeros


@every_gpu
@pytest.mark.parametrize("heads", [32, 48])
def test_gates_compile(heads, gpu):
    with compiles(gates_and_norm, "_gates", gpu):
        gates_and_norm.compute_gates(zeros(2, 2 * heads), torch.zeros(heads), torch.zeros(heads))


@every_gpu
@pytest.mark.parametrize("heads", [32, 48])
def test_the_gated_norm_compiles(heads, gpu):
    with compiles(gates_and_norm, "_norm_and_gate", gpu):
        x = zeros(2, heads, 128)
        gates_and_norm.norm_and_gate(x, zeros(2, heads * 128), zeros(128), 1e-6, torch.empty_like(x))
