"""Gated DeltaNet of few tokens a request under Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from atom_core.kernels import kernel_set
from atom_core.kernels.gated_delta_net import (
    GATED_DELTA_DECODE,
    GATED_DELTA_NET,
    GatedDeltaDecodeSpec,
    GatedDeltaNetSpec,
)
from atom_core.kernels.select import Target
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


@pytest.mark.parametrize(
    ("key_dim", "width", "net", "decode"),
    [
        (128, 4, "triton", "triton"),
        (256, 4, "reference", "separate"),
        (128, 5, "reference", "separate"),
    ],
)
def test_what_the_kernels_do_not_support_the_reference_runs(key_dim, width, net, decode):
    kernels = kernel_set(Target("cuda", "sm90"))
    spec = GatedDeltaNetSpec(16, 32, key_dim, 128, width, torch.bfloat16, torch.float32)
    chosen = kernels.chosen(GATED_DELTA_NET, spec)
    fused = kernels.chosen(GATED_DELTA_DECODE, GatedDeltaDecodeSpec(spec, ((GATED_DELTA_NET.name, chosen),)))
    assert (chosen, fused) == (net, decode)


def test_counters_grow_with_batches_and_graphs_keep_theirs():
    """What a graph was captured with must be there while it is replayed."""
    kernel = kernel_of(FEW_CASES[0], torch.float32)
    few = kernel._counters(3, CPU)
    assert kernel._counters(4096, CPU) is few
    more = kernel._counters(5000, CPU)
    assert more.numel() >= 5000
    assert not more.any()
    assert kernel._arrivals == [few, more]
