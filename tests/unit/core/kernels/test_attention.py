"""The attention op, token by token: the reference, and the Triton kernel under Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from atom_core.kernels.attention.reference import ReferenceAttention
from tests.kernel_cases import ATTENTION_CASES, attention_batch, check_attention

CPU = torch.device("cpu")

every_case = pytest.mark.parametrize("case", ATTENTION_CASES, ids=str)


@every_case
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_reference_answers_as_token_by_token(case, dtype):
    check_attention(ReferenceAttention(case.spec(dtype)), attention_batch(case, dtype, CPU))


@every_case
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)  # the interpreter multiplies no bfloat16
def test_the_triton_kernel_answers_as_token_by_token(case, dtype):
    from atom_core.kernels.attention.triton_kernel import TritonAttention

    check_attention(TritonAttention(case.spec(dtype)), attention_batch(case, dtype, CPU))
