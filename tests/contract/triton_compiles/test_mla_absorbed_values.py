"""MLA's decode with the value projection behind it compiles for Hopper."""

from __future__ import annotations

import pytest
import torch

from atom_core.kernels.attention import splits
from atom_core.kernels.mla_absorbed_values import triton_kernel as mla_absorbed_values_kernel
from atom_core.kernels.mla_attention import hopper as latent_hopper
from tests.contract.triton_compiles.compiling import CPU, DEEPSEEK, GPUS, compile_launch, keep
from tests.latent_cases import LatentCase, latent_batch


@pytest.mark.parametrize(("heads", "requests"), [(16, 1), (16, 8), (16, 16), (16, 32), (20, 10), (128, 1)])
def test_decoding_to_values_compiles_for_hopper(monkeypatch, heads, requests):
    case = LatentCase("", ((200, 1),) * (requests - 1) + ((300, 1),), heads=heads, **DEEPSEEK)
    kept = keep(monkeypatch, (latent_hopper, "latent_decode_hopper"), (mla_absorbed_values_kernel, "_values_of_splits"))
    monkeypatch.setattr(splits, "multiprocessors", lambda device: 132)
    launch = mla_absorbed_values_kernel.TritonMlaAbsorbedValues(case.spec(torch.bfloat16), overlap=True)
    inputs = latent_batch(case, torch.bfloat16, CPU)
    out = torch.empty(requests, heads, case.value_dim, dtype=torch.bfloat16)
    assert launch.takes(requests, inputs.cache, inputs.batch)
    launch(inputs.folded, inputs.cache, inputs.batch, inputs.expand[:, case.nope_dim :].transpose(1, 2), out)
    launched = kept()
    assert len(launched) == 2
    for kernel, arguments in launched:
        compile_launch(kernel, arguments, GPUS[-1])
