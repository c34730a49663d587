"""Attention over paged keys and values compiles for each GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from atom_core.kernels.attention import hopper as prompts_hopper
from atom_core.kernels.attention import triton_kernel as attention_kernel
from tests.contract.triton_compiles.compiling import CPU, FP8_CACHES, GPUS, compiles
from tests.kernel_cases import AttentionCase, attention_batch, check_attention

#: Tiles are of other sizes where each request has one query than where some have many.
BATCHES = {"decode": ((9, 1), (15, 1)), "prefill": ((9, 1), (0, 40))}

ATTENTION = {
    "Qwen3 8B, bfloat16": (AttentionCase("", (), heads=8, kv_heads=2, dim=128), torch.bfloat16),
    "all features, float16": (
        AttentionCase("", (), heads=8, kv_heads=1, dim=64, page_size=64, window=128, soft_cap=30.0, sinks=True),
        torch.float16,
    ),
    "the largest head, bfloat16": (AttentionCase("", (), heads=8, kv_heads=4, dim=256), torch.bfloat16),
    "the largest head, float32": (AttentionCase("", (), heads=8, kv_heads=4, dim=256), torch.float32),
    "Qwen3 8B, float32": (AttentionCase("", (), heads=8, kv_heads=2, dim=128), torch.float32),
    "a group of 64, bfloat16": (AttentionCase("", (), heads=64, kv_heads=1, dim=128), torch.bfloat16),
    "an odd head, one token a page, bfloat16": (AttentionCase("", (), dim=80, page_size=1), torch.bfloat16),
}

#: FP8 keys and values are widened to the queries' dtype: float32 tiles are the largest, 16-bit ones the usual.
FP8_ATTENTION = ("Qwen3 8B, bfloat16", "the largest head, float32")


@pytest.mark.parametrize(("gpu", "cache_dtype"), [(gpu, None) for gpu in GPUS], ids=str)
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("name", ATTENTION)
def test_attention_compiles(name, batch, gpu, cache_dtype):
    layer, dtype = ATTENTION[name]
    case = replace(layer, requests=BATCHES[batch])
    with compiles(attention_kernel, "_attention", gpu):
        check_attention(
            attention_kernel.TritonAttention(case.spec(dtype, cache_dtype), nvidia=gpu.nvidia, overlap=gpu.nvidia),
            attention_batch(case, dtype, CPU, cache_dtype=cache_dtype),
        )


@pytest.mark.parametrize(("gpu", "cache_dtype"), FP8_CACHES, ids=str)
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("name", FP8_ATTENTION)
def test_attention_over_an_fp8_cache_compiles(name, batch, gpu, cache_dtype):
    test_attention_compiles(name, batch, gpu, cache_dtype)


#: Groups of 4, 5, 7, 8 and 16 query heads, and what models have besides.
PROMPTS = {
    "head size 64": AttentionCase("", (), heads=64, kv_heads=8, dim=64, window=128, sinks=True),
    "head size 128": AttentionCase("", (), heads=32, kv_heads=8, dim=128),
    "head size 256": AttentionCase("", (), heads=16, kv_heads=2, dim=256),
    "five heads a group, one token a page": AttentionCase("", (), heads=40, kv_heads=8, dim=128, page_size=1),
    "seven heads a group, a window": AttentionCase("", (), heads=28, kv_heads=4, dim=128, page_size=48, window=700),
    "sixteen heads a group, soft cap": AttentionCase("", (), heads=16, kv_heads=1, dim=256, page_size=64, soft_cap=5.0),
}


@pytest.mark.parametrize("large", [False, True], ids=["small tiles", "large tiles"])
@pytest.mark.parametrize("name", PROMPTS)
def test_prompts_compile_for_hopper(monkeypatch, name, large):
    case = replace(PROMPTS[name], requests=BATCHES["prefill"])
    kernel = attention_kernel.TritonAttention(case.spec(torch.bfloat16), nvidia=True, overlap=True, hopper=True)
    monkeypatch.setattr(kernel.prompts, "tile", lambda batch, device: prompts_hopper._TILES[case.dim][large])
    with compiles(prompts_hopper, "prompt_attention_hopper", GPUS[-1]) as found:
        check_attention(kernel, attention_batch(case, torch.bfloat16, CPU))
    assert found.compiled is not None
    assert "wgmma.wait_group.sync.aligned 1" in found.compiled.asm["ptx"], "a softmax runs during a product"


@pytest.mark.parametrize("multiprocessors", [1, 132], ids=["large tiles", "small tiles"])
@pytest.mark.parametrize("name", PROMPTS)
def test_prompts_over_an_fp8_cache_compile_for_hopper(monkeypatch, name, multiprocessors):
    monkeypatch.setattr(attention_kernel, "multiprocessors", lambda device: multiprocessors)
    case, dtypes = replace(PROMPTS[name], requests=BATCHES["prefill"]), (torch.bfloat16, torch.float8_e4m3fn)
    kernel = attention_kernel.TritonAttention(case.spec(*dtypes), nvidia=True, overlap=True, hopper=True)
    with compiles(attention_kernel, "_attention", GPUS[-1]) as found:
        check_attention(kernel, attention_batch(case, torch.bfloat16, CPU, cache_dtype=torch.float8_e4m3fn))
    assert found.launched is not None
    assert found.launched.constants["BLOCK_M"] == (128 if multiprocessors == 1 else 64)
