"""Gated DeltaNet of few tokens a request under Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from tests.gated_delta_cases import FEW_CASES, check_delta, delta_batch

CPU = torch.device("cpu")


def kernel_of(case, dtype, state_dtype=torch.float32, nvidia=True):
    """Triton's, for a case."""
    from atom_core.kernels.gated_delta_net.triton_decode import TritonGatedDeltaDecode

    return TritonGatedDeltaDecode(case.spec(dtype, state_dtype), nvidia, overlap=False)


@pytest.mark.parametrize("case", FEW_CASES, ids=str)
@pytest.mark.parametrize(
    ("dtype", "state_dtype", "conv_dtype"),
    [
        (torch.float32, torch.float32, torch.float32),
        (torch.bfloat16, torch.float32, torch.bfloat16),
        (torch.bfloat16, torch.bfloat16, torch.float32),
    ],
    ids=["float32", "bfloat16", "bfloat16 states"],
)
def test_it_answers_as_the_reference(exact_bfloat16, case, dtype, state_dtype, conv_dtype):
    check_delta(kernel_of(case, dtype, state_dtype), delta_batch(case, dtype, CPU, state_dtype, conv_dtype))


def test_counters_grow_with_batches_and_graphs_keep_theirs():
    """What a graph was captured with must be there while it is replayed."""
    kernel = kernel_of(FEW_CASES[0], torch.float32)
    few = kernel._counters(3, CPU)
    assert kernel._counters(4096, CPU) is few
    more = kernel._counters(5000, CPU)
    assert more.numel() >= 5000
    assert not more.any()
    assert kernel._arrivals == [few, more]
