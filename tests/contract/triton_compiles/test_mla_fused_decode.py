"""MLA of one token, from its latents to its values, compiles for Hopper."""

from __future__ import annotations

import pytest
import torch

from atom_core.kernels.attention import splits
from atom_core.kernels.mla_absorbed_values import triton_kernel as mla_absorbed_values_kernel
from atom_core.kernels.mla_attention import hopper as latent_hopper
from atom_core.kernels.mla_fused_decode import hopper as mla_fused_decode_hopper
from tests.contract.triton_compiles.compiling import CPU, DEEPSEEK, GPUS, compile_launch, keep
from tests.latent_cases import LatentCase, check_mla_fused_decode


@pytest.mark.parametrize(("heads", "before"), [(16, 200), (128, 200), (16, 5000)])
def test_one_token_over_latents_compiles_for_hopper(monkeypatch, heads, before):
    case = LatentCase("", ((before, 1),), heads=heads, **DEEPSEEK)
    kernels = [(mla_fused_decode_hopper, "mla_fused_decode_hopper"), (latent_hopper, "latent_decode_hopper")]
    kept = keep(monkeypatch, *kernels, (mla_absorbed_values_kernel, "_values_of_splits"))
    monkeypatch.setattr(splits, "multiprocessors", lambda device: 132)
    launch = mla_fused_decode_hopper.MlaFusedDecode(case.spec(torch.bfloat16), overlap=True)
    with pytest.raises(AssertionError, match="differs by nan"):  # nothing has run
        check_mla_fused_decode(case, launch, torch.bfloat16, CPU)
    launched = kept()
    assert len(launched) == 3
    for kernel, arguments in launched:
        compile_launch(kernel, arguments, GPUS[-1])
