"""The fused decoding attention on this GPU, over every case, and over batches as large as servers make them."""

from __future__ import annotations

import pytest
import torch

from atom_core.kernels.cache_dtypes import FP8_DTYPES
from atom_core.kernels.decode_attention.hopper import HopperDecodeAttention
from atom_core.kernels.decode_attention.triton_kernel import TritonDecodeAttention
from atom_core.kernels.select import Target
from atom_core.kernels.triton_support import overlaps, why_no_triton_cache
from tests.decode_cases import DECODE_CASES, LARGE_DECODE, SAME_STEP_READS, check_decode, wide

GPU = torch.device("cuda")
ARCH = Target.of(GPU).arch
HERE = {"nvidia": torch.version.hip is None, "overlap": overlaps(Target.of(GPU))}
CACHES = (None, *(dtype for dtype in FP8_DTYPES if why_no_triton_cache(torch.bfloat16, dtype, Target.of(GPU)) is None))


@pytest.mark.parametrize("cache_dtype", CACHES, ids=str)
@pytest.mark.parametrize("case", DECODE_CASES + SAME_STEP_READS + LARGE_DECODE, ids=str)
def test_it_answers_as_the_ops_it_is_made_of(case, cache_dtype):
    spec = case.spec(torch.bfloat16, cache_dtype)
    check_decode(case, TritonDecodeAttention(spec, **HERE), spec, GPU)


@pytest.mark.parametrize("case", DECODE_CASES + SAME_STEP_READS, ids=str)
def test_it_takes_float32(case):
    spec = case.spec(torch.float32)
    check_decode(case, TritonDecodeAttention(spec, **HERE), spec, GPU)


@pytest.mark.skipif(ARCH != "sm90", reason="the kernel is for Hopper")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("cache_dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize("case", DECODE_CASES + SAME_STEP_READS + LARGE_DECODE, ids=str)
def test_hopper_s_own_kernel_widens_fp8_in_registers(case, dtype, cache_dtype):
    case = wide(case, 128)
    spec = case.spec(dtype, cache_dtype)
    kernel = TritonDecodeAttention(spec, **HERE, hopper=True)
    kernel.hopper = HopperDecodeAttention(spec, HERE["overlap"])
    check_decode(case, kernel, spec, GPU)


@pytest.mark.skipif(ARCH != "sm90", reason="the kernel is for Hopper")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", DECODE_CASES + SAME_STEP_READS + LARGE_DECODE, ids=str)
def test_hopper_has_a_kernel_of_its_own(case, dtype):
    case = wide(case)
    spec = case.spec(dtype)
    kernel = TritonDecodeAttention(spec, **HERE, hopper=True)
    assert kernel.hopper is not None
    check_decode(case, kernel, spec, GPU)
