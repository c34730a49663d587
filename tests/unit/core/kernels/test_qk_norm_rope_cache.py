"""From raw qkv to a query and a filled cache: the reference, and the Triton kernel under Triton's interpreter."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch

from atom_core.kernels.cache_dtypes import FP8_DTYPES, quantize
from atom_core.kernels.qk_norm_rope_cache.cpu import qk_norm_rope_cache as on_cpu
from atom_core.kernels.qk_norm_rope_cache.reference import qk_norm_rope_cache
from tests.kernel_cases import FP8_QKV_CASES, QKV_CASES, SHUFFLED_QKV_CASES, check_qkv

CPU = torch.device("cpu")

every_shuffled_case = pytest.mark.parametrize("case", SHUFFLED_QKV_CASES, ids=str)
every_case = pytest.mark.parametrize("case", QKV_CASES, ids=str)
every_fp8_case = pytest.mark.parametrize("case", FP8_QKV_CASES, ids=str)
every_fp8_dtype = pytest.mark.parametrize("cache_dtype", FP8_DTYPES, ids=str)


@every_case
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_reference_norms_rotates_and_writes(case, dtype):
    check_qkv(case, partial(qk_norm_rope_cache, spec=case.spec(dtype)), dtype, CPU)


@every_case
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("padded", [False, True])
def test_the_torch_kernel_norms_rotates_and_writes(case, dtype, padded):
    check_qkv(case, partial(on_cpu, spec=case.spec(dtype)), dtype, CPU, padded=padded)


@every_case
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)  # the interpreter cuts bfloat16 off
def test_the_triton_kernel_norms_rotates_and_writes(case, dtype):
    from atom_core.kernels.qk_norm_rope_cache.triton_kernel import qk_norm_rope_cache as launch

    check_qkv(case, partial(launch, spec=case.spec(dtype)), dtype, CPU)


@every_fp8_case
@every_fp8_dtype
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_reference_and_the_torch_kernel_fill_an_fp8_cache(case, dtype, cache_dtype):
    spec = case.spec(dtype)
    check_qkv(case, partial(qk_norm_rope_cache, spec=spec), dtype, CPU, cache_dtype=cache_dtype)
    for padded in (False, True):
        check_qkv(case, partial(on_cpu, spec=spec), dtype, CPU, padded=padded, cache_dtype=cache_dtype)


@every_fp8_case
@every_fp8_dtype
def test_the_triton_kernel_fills_an_fp8_cache(exact_fp8_casts, case, cache_dtype):
    from atom_core.kernels.qk_norm_rope_cache.triton_kernel import qk_norm_rope_cache as launch

    spec = case.spec(torch.float16)
    check_qkv(case, partial(launch, spec=spec), torch.float16, CPU, cache_dtype=cache_dtype)


@every_fp8_dtype
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_an_fp8_cache_holds_its_largest_number_for_any_beyond_and_nan_for_nan(cache_dtype, dtype):
    limit = torch.finfo(cache_dtype).max
    infinity = float("inf")
    found = quantize(torch.tensor([infinity, -infinity, 65504.0, -65504.0, 0.0], dtype=dtype), 0.25, cache_dtype)
    assert found.float().tolist() == [limit, -limit, limit, -limit, 0.0]
    assert quantize(torch.tensor([float("nan")], dtype=dtype), 0.25, cache_dtype).float().isnan().all()


@every_shuffled_case
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_reference_fills_shuffled_pages(case, dtype):
    check_qkv(case, partial(qk_norm_rope_cache, spec=case.spec(dtype)), dtype, CPU)


@every_shuffled_case
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_the_triton_kernel_fills_shuffled_pages(case, dtype):
    from atom_core.kernels.qk_norm_rope_cache.triton_kernel import qk_norm_rope_cache as launch

    check_qkv(case, partial(launch, spec=case.spec(dtype)), dtype, CPU)


@every_shuffled_case
@every_fp8_dtype
def test_shuffled_pages_in_fp8(exact_fp8_casts, case, cache_dtype):
    from atom_core.kernels.qk_norm_rope_cache.triton_kernel import qk_norm_rope_cache as launch

    spec = case.spec(torch.float16)
    case = replace(case, k_scale=0.5, v_scale=4.0)
    for kernel in (launch, qk_norm_rope_cache):
        check_qkv(case, partial(kernel, spec=spec), torch.float16, CPU, cache_dtype=cache_dtype)
