"""MLA's attention over cached latents, and the slots of its keys, compile for each GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from atom_core.kernels.attention import splits
from atom_core.kernels.cache_dtypes import is_foreign
from atom_core.kernels.mla_attention import hopper as latent_hopper
from atom_core.kernels.mla_attention import token_slots as slots_kernel
from atom_core.kernels.mla_attention import triton_kernel as latent_kernel
from tests.contract.triton_compiles.compiling import CPU, DEEPSEEK, FP8_CACHES, GPUS, LATENTS, compiles, every_gpu
from tests.latent_cases import LatentCase, check_absorbed, latent_batch

#: A few tokens that share out a request's rows, many tokens each, and more requests than are shared out.
LATENT_BATCHES = {"decode": ((9, 1), (300, 1)), "prefill": ((9, 1), (0, 40)), "many": ((9, 1),) * 300}


@pytest.mark.parametrize(("gpu", "cache_dtype"), [(gpu, None) for gpu in GPUS], ids=str)
@pytest.mark.parametrize("batch", LATENT_BATCHES)
@pytest.mark.parametrize("name", LATENTS)
def test_attention_over_latents_compiles(name, batch, gpu, cache_dtype):
    layer, dtype = LATENTS[name]
    case = replace(layer, requests=LATENT_BATCHES[batch])
    spec = case.spec(dtype, cache_dtype)
    with compiles(latent_kernel, "_mla_attention", gpu):
        check_absorbed(
            case,
            latent_kernel.TritonMlaAttention(
                spec,
                nvidia=gpu.nvidia,
                overlap=gpu.nvidia,
                foreign=cache_dtype is not None and is_foreign(cache_dtype, str(gpu.target.arch)),
            ),
            latent_batch(case, dtype, CPU, cache_dtype=cache_dtype),
        )


@pytest.mark.parametrize("queries", [1, 2, 3, 8])
@pytest.mark.parametrize("requests", [1, 10, 300])
@pytest.mark.parametrize("heads", [1, 16, 20, 128])
def test_decoding_over_latents_compiles_for_hopper(monkeypatch, heads, requests, queries):
    case = LatentCase("", ((9, queries),) * (requests - 1) + ((300, queries),), heads=heads, **DEEPSEEK)
    monkeypatch.setattr(splits, "multiprocessors", lambda device: 132)
    launch = latent_kernel.TritonMlaAttention(case.spec(torch.bfloat16), nvidia=True, overlap=True, hopper=True)
    with compiles(latent_hopper, "latent_decode_hopper", GPUS[-1]):
        check_absorbed(case, launch, latent_batch(case, torch.bfloat16, CPU))


@pytest.mark.parametrize(("gpu", "cache_dtype"), FP8_CACHES, ids=str)
@pytest.mark.parametrize("batch", ["decode", "prefill"])
@pytest.mark.parametrize("name", ["16 heads, bfloat16", "16 heads, float32"])
def test_attention_over_latents_in_fp8_compiles(name, batch, gpu, cache_dtype):
    test_attention_over_latents_compiles(name, batch, gpu, cache_dtype)


@pytest.mark.parametrize("batch", LATENT_BATCHES)
def test_three_tiles_of_latents_fit_hopper_beside_32_heads(monkeypatch, batch):
    monkeypatch.setitem(LATENTS, "32 heads", (LatentCase("", (), heads=32, **DEEPSEEK), torch.bfloat16))
    test_attention_over_latents_compiles("32 heads", batch, GPUS[-1], None)


@every_gpu
@pytest.mark.parametrize("page_size", [1, 16])
def test_slots_of_keys_compile(page_size, gpu):
    lengths, table = torch.ones(3, dtype=torch.int32), torch.ones(3, 8, dtype=torch.int32)
    found = slots_kernel.TokenSlots(1, *(torch.empty(8, dtype=torch.int32) for _ in range(4)))
    with compiles(slots_kernel, "_token_slots", gpu):
        slots_kernel.fill_on_device(found, lengths, table, 9, page_size)
