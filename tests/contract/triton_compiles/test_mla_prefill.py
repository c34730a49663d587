"""MLA's attention of prompts, over expanded latents, compiles for each GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest

from atom_core.kernels.mla_prefill import triton_kernel as prefill_kernel
from tests.contract.triton_compiles.compiling import CPU, LATENTS, compiles, every_gpu
from tests.latent_cases import check_expanded, latent_batch


@every_gpu
@pytest.mark.parametrize("name", LATENTS)
def test_attention_over_expanded_latents_compiles(name, gpu):
    layer, dtype = LATENTS[name]
    case = replace(layer, requests=((0, 40), (0, 9)))
    launch = prefill_kernel.TritonMlaPrefill(case.spec(dtype), nvidia=gpu.nvidia, overlap=gpu.nvidia)
    with compiles(prefill_kernel, "_mla_prefill", gpu):
        check_expanded(case, launch, latent_batch(case, dtype, CPU))
