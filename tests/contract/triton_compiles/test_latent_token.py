"""MLA of one token, from its latents to its values, compiles for Hopper."""

from __future__ import annotations

import pytest
import torch

from atom_core.kernels.attention import splits
from atom_core.kernels.latent_attention import hopper as latent_hopper
from atom_core.kernels.latent_token import hopper as latent_token_hopper
from atom_core.kernels.latent_values import triton_kernel as latent_values_kernel
from tests.contract.triton_compiles.compiling import CPU, DEEPSEEK, GPUS, compile_launch, keep
from tests.latent_cases import LatentCase, check_latent_token


@pytest.mark.parametrize(("heads", "before"), [(16, 200), (128, 200), (16, 5000)])
def test_one_token_over_latents_compiles_for_hopper(monkeypatch, heads, before):
    case = LatentCase("", ((before, 1),), heads=heads, **DEEPSEEK)
    kernels = [(latent_token_hopper, "latent_token_hopper"), (latent_hopper, "latent_decode_hopper")]
    kept = keep(monkeypatch, *kernels, (latent_values_kernel, "_values_of_parts"))
    monkeypatch.setattr(splits, "multiprocessors", lambda device: 132)
    launch = latent_token_hopper.LatentToken(case.spec(torch.bfloat16), overlap=True)
    with pytest.raises(AssertionError, match="differs by nan"):  # nothing has run
        check_latent_token(case, launch, torch.bfloat16, CPU)
    launched = kept()
    assert len(launched) == 3
    for kernel, arguments in launched:
        compile_launch(kernel, arguments, GPUS[-1])
