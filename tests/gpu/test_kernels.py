"""The Triton kernels on this GPU, over every case in every dtype, and over batches as large as servers make them."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch

from atom_core.kernels.attention.triton_kernel import TritonAttention
from atom_core.kernels.cache_dtypes import FP8_DTYPES
from atom_core.kernels.qk_norm_rope_cache.triton_kernel import qk_norm_rope_cache
from atom_core.kernels.select import Target
from atom_core.kernels.triton_support import overlaps, why_no_triton_cache
from tests.kernel_cases import (
    ATTENTION_CASES,
    FP8_QKV_CASES,
    QKV_CASES,
    AttentionCase,
    QkvCase,
    attention_batch,
    check_attention,
    check_qkv,
)

GPU = torch.device("cuda")
HERE = {"nvidia": torch.version.hip is None, "overlap": overlaps(Target.of(GPU))}
ATTENTION_HERE = {**HERE, "hopper": (Target.of(GPU).kind, Target.of(GPU).arch) == ("cuda", "sm90")}

every_dtype = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)


@pytest.fixture(params=FP8_DTYPES, ids=str)
def cache_dtype(request):
    """An FP8 dtype that this GPU's caches may have."""
    if reason := why_no_triton_cache(torch.bfloat16, request.param, Target.of(GPU)):
        pytest.skip(reason)
    return request.param


_LONG = ((4095, 1), (1000, 1), (17, 1), (2048, 513), (0, 700), (0, 1))
LARGE_ATTENTION = (
    AttentionCase("Qwen3 8B", _LONG, heads=32, kv_heads=8, dim=128),
    AttentionCase("Llama 3.2 1B", _LONG, heads=32, kv_heads=8, dim=64, page_size=32),
    AttentionCase("a window", _LONG, heads=32, kv_heads=8, dim=128, window=1024),
    AttentionCase("sinks and a window", _LONG, heads=64, kv_heads=8, dim=64, window=128, sinks=True),
    AttentionCase("Qwen3.5 35B-A3B", _LONG, heads=16, kv_heads=2, dim=256),
    AttentionCase("five query heads a group", _LONG, heads=40, kv_heads=8, dim=128, page_size=1),
    AttentionCase("seven query heads a group", _LONG, heads=28, kv_heads=4, dim=128, page_size=48),
    AttentionCase("sixteen query heads a group", _LONG, heads=32, kv_heads=2, dim=128, page_size=256, window=700),
    AttentionCase("prompts alone", ((0, 300), (0, 1), (0, 129), (64, 1000)), heads=16, kv_heads=2, dim=256),
    AttentionCase("many prompts", ((0, 200), (100, 77)) * 9, heads=32, kv_heads=8, dim=128),
    AttentionCase("soft cap, the largest head", _LONG, heads=16, kv_heads=8, dim=256, soft_cap=50.0),
    AttentionCase(
        "256 requests that decode", tuple((7 * index, 1) for index in range(256)), heads=16, kv_heads=8, dim=128
    ),
    AttentionCase("head by head in storage", _LONG, heads=16, kv_heads=4, dim=128, storage="HPN", page_size=64),
)
LARGE_QKV = (
    QkvCase("Qwen3 8B", heads=32, kv_heads=8, dim=128, rotary_dim=128, qk_norm=True, tokens=3000),
    QkvCase("Llama 3.2 1B", heads=32, kv_heads=8, dim=64, rotary_dim=64, tokens=3000, page_size=32),
)


@every_dtype
@pytest.mark.parametrize("case", ATTENTION_CASES, ids=str)
def test_attention(case, dtype):
    check_attention(TritonAttention(case.spec(dtype), **ATTENTION_HERE), attention_batch(case, dtype, GPU))


@every_dtype
@pytest.mark.parametrize("case", LARGE_ATTENTION, ids=str)
def test_attention_over_large_batches(case, dtype):
    check_attention(
        TritonAttention(case.spec(dtype), **ATTENTION_HERE), attention_batch(case, dtype, GPU, by_token=False)
    )


@every_dtype
@pytest.mark.parametrize("case", QKV_CASES + LARGE_QKV, ids=str)
def test_qk_norm_rope_cache(case, dtype):
    check_qkv(case, partial(qk_norm_rope_cache, spec=case.spec(dtype), overlap=HERE["overlap"]), dtype, GPU)


@every_dtype
@pytest.mark.parametrize("case", ATTENTION_CASES, ids=str)
def test_attention_over_an_fp8_cache(case, dtype, cache_dtype):
    batch = attention_batch(case, dtype, GPU, cache_dtype=cache_dtype)
    check_attention(TritonAttention(case.spec(dtype, cache_dtype), **ATTENTION_HERE), batch)


@pytest.mark.parametrize("case", LARGE_ATTENTION, ids=str)
def test_attention_over_large_batches_and_an_fp8_cache(case, cache_dtype):
    batch = attention_batch(case, torch.bfloat16, GPU, by_token=False, cache_dtype=cache_dtype)
    check_attention(TritonAttention(case.spec(torch.bfloat16, cache_dtype), **ATTENTION_HERE), batch)


@every_dtype
@pytest.mark.parametrize("case", FP8_QKV_CASES + LARGE_QKV, ids=str)
def test_qk_norm_rope_and_an_fp8_cache(case, dtype, cache_dtype):
    launch = partial(qk_norm_rope_cache, spec=case.spec(dtype), overlap=HERE["overlap"])
    check_qkv(case, launch, dtype, GPU, cache_dtype=cache_dtype)


def test_offsets_past_two_billion_elements():
    # 64 pages, each a stride of 2^26 numbers apart from the next: the last begins past what 32 bits count.
    case = AttentionCase("far pages", ((900, 1), (0, 70)), heads=4, kv_heads=1, dim=64)
    batch = attention_batch(case, torch.bfloat16, GPU)
    pages = batch.cache.key.shape[0]
    storage = torch.empty(pages * 2**26, dtype=torch.bfloat16, device=GPU)
    far = storage.as_strided((pages, 1, case.page_size, 2 * case.dim), (2**26, 2048, 2 * case.dim, 1))
    far[..., : case.dim] = batch.cache.key
    far[..., case.dim :] = batch.cache.value
    cache = type(batch.cache).of_packed(far, case.dim)
    assert (pages - 1) * 2**26 > 2**31
    check_attention(TritonAttention(case.spec(torch.bfloat16), **ATTENTION_HERE), replace(batch, cache=cache))
