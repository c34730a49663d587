"""Gated DeltaNet of any batch under Triton's interpreter, which multiplies no bfloat16."""

from __future__ import annotations

import pytest
import torch

from tests.gated_delta_cases import PROMPT_CASES, check_delta, delta_batch

CPU = torch.device("cpu")


def kernel_of(case, dtype, state_dtype=torch.float32, nvidia=True):
    """Triton's, for a case."""
    from atom_core.kernels.gated_delta_net.triton_prefill import TritonGatedDeltaNet

    return TritonGatedDeltaNet(case.spec(dtype, state_dtype), nvidia, overlap=False)


@pytest.mark.parametrize("case", PROMPT_CASES, ids=str)
@pytest.mark.parametrize(
    ("dtype", "state_dtype"),
    [(torch.float32, torch.float32), (torch.float16, torch.float32), (torch.float16, torch.bfloat16)],
    ids=["float32", "float16", "bfloat16 states"],
)
def test_it_answers_as_the_reference(case, dtype, state_dtype):
    kernel = kernel_of(case, dtype, state_dtype)
    check_delta(kernel, delta_batch(case, dtype, CPU, state_dtype), times=10 if dtype == torch.float32 else 2)
