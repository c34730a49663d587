"""The attention op, token by token: the reference, and the Triton kernel under Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from atom_core.kernels.attention import ATTENTION, PagedAttentionSpec
from atom_core.kernels.attention.reference import ReferenceAttention
from atom_core.kernels.attention.sdpa import SdpaAttention
from atom_core.kernels.attention.splits import best_split_count
from atom_core.kernels.cache_dtypes import FP8_DTYPES
from atom_core.kernels.select import Target
from tests.kernel_cases import ATTENTION_CASES, attention_batch, check_attention

CPU = torch.device("cpu")

every_case = pytest.mark.parametrize("case", ATTENTION_CASES, ids=str)
every_fp8_dtype = pytest.mark.parametrize("cache_dtype", FP8_DTYPES, ids=str)


@every_case
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_reference_answers_as_token_by_token(case, dtype):
    check_attention(ReferenceAttention(case.spec(dtype)), attention_batch(case, dtype, CPU))


@every_case
@pytest.mark.parametrize(("dtype", "nvidia"), [(torch.float32, False), (torch.float16, True)], ids=str)
def test_the_triton_kernel_answers_as_token_by_token(case, dtype, nvidia):  # the interpreter multiplies no bfloat16
    from atom_core.kernels.attention.triton_kernel import TritonAttention

    check_attention(TritonAttention(case.spec(dtype), nvidia, overlap=False), attention_batch(case, dtype, CPU))


@every_case
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_torchs_attention_answers_as_token_by_token_where_it_says_that_it_can(case, dtype):
    spec = case.spec(dtype)
    reason = why_not_torch(spec)
    if spec.sinks or spec.soft_cap:
        assert reason == "torch's attention has neither sinks nor a soft cap."
        return
    assert reason is None
    check_attention(SdpaAttention(spec), attention_batch(case, dtype, CPU))


@every_case
@every_fp8_dtype
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_reference_and_torchs_attention_read_an_fp8_cache(case, dtype, cache_dtype):
    batch = attention_batch(case, dtype, CPU, cache_dtype=cache_dtype)
    spec = case.spec(dtype, cache_dtype)
    check_attention(ReferenceAttention(spec), batch)
    if why_not_torch(spec) is None:
        check_attention(SdpaAttention(spec), batch)


@every_case
@every_fp8_dtype
def test_the_triton_kernel_reads_an_fp8_cache(exact_fp8_casts, case, cache_dtype):
    from atom_core.kernels.attention.triton_kernel import TritonAttention

    batch = attention_batch(case, torch.float16, CPU, cache_dtype=cache_dtype)
    check_attention(TritonAttention(case.spec(torch.float16, cache_dtype), False, overlap=False), batch)


def why_not_torch(spec: PagedAttentionSpec, target: Target | None = None) -> str | None:
    (implementation,) = (one for one in ATTENTION.implementations if one.name == "torch")
    return implementation.supports(spec, target or Target("cpu", "x86_64"))


def test_torchs_attention_says_which_caches_it_reads():
    case = ATTENTION_CASES[0]
    assert all(why_not_torch(case.spec(torch.bfloat16, dtype)) is None for dtype in FP8_DTYPES)
    assert "torch.bfloat16 or in FP8, not torch.float16." in why_not_torch(case.spec(torch.bfloat16, torch.float16))


def test_torchs_attention_is_for_a_cpu():
    assert "quickest on a CPU" in why_not_torch(ATTENTION_CASES[0].spec(torch.bfloat16), Target("cuda", "sm90"))


def test_keys_are_shared_so_that_a_gpu_is_filled_once_or_evenly():
    # Programs, most parts, and the parts of each; 132 run at a time.
    for programs, most, expected in (
        (1, 32, 32),
        (8, 32, 16),
        (64, 8, 2),
        (128, 4, 1),
        (132, 3, 1),
        (140, 3, 3),
        (256, 2, 1),
    ):
        assert best_split_count(programs, most, 132) == expected
