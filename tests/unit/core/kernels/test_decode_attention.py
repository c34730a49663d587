"""The fused decoding attention under Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from atom_core.kernels.cache_dtypes import FP8_DTYPES
from tests.decode_cases import DECODE_CASES, SAME_STEP_READS, check_decode

CPU = torch.device("cpu")

every_case = pytest.mark.parametrize("case", DECODE_CASES + SAME_STEP_READS, ids=str)


@every_case
@pytest.mark.parametrize(("dtype", "nvidia"), [(torch.float32, False), (torch.float16, True)], ids=str)
def test_it_answers_as_the_ops_it_is_made_of(case, dtype, nvidia):  # the interpreter multiplies no bfloat16
    from atom_core.kernels.decode_attention.triton_kernel import TritonDecodeAttention

    spec = case.spec(dtype)
    check_decode(case, TritonDecodeAttention(spec, nvidia, overlap=False), spec, CPU)


@every_case
@pytest.mark.parametrize("cache_dtype", FP8_DTYPES, ids=str)
def test_it_reads_and_writes_an_fp8_cache(exact_fp8_casts, case, cache_dtype):
    from atom_core.kernels.decode_attention.triton_kernel import TritonDecodeAttention

    spec = case.spec(torch.float16, cache_dtype)
    check_decode(case, TritonDecodeAttention(spec, False, overlap=False), spec, CPU)
