"""Gated DeltaNet of any batch under Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from atom_core.kernels.gated_delta_net.reference import OneByOne, gated_delta_rule
from tests.gated_delta_cases import PROMPT_CASES, DeltaCase, Request, check_delta, delta_batch

CPU = torch.device("cpu")


def kernel_of(case, dtype, state_dtype=torch.float32, nvidia=True):
    """Triton's, for a case."""
    from atom_core.kernels.gated_delta_net.triton_prefill import TritonGatedDeltaNet

    return TritonGatedDeltaNet(case.spec(dtype, state_dtype), nvidia, overlap=False)


@pytest.mark.parametrize("case", PROMPT_CASES, ids=str)
@pytest.mark.parametrize(
    ("dtype", "state_dtype"),
    [
        (torch.float32, torch.float32),
        (torch.float16, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.bfloat16, torch.bfloat16),
    ],
    ids=["float32", "float16", "bfloat16", "bfloat16 states"],
)
def test_it_answers_as_the_reference(exact_bfloat16, case, dtype, state_dtype):
    kernel = kernel_of(case, dtype, state_dtype)
    check_delta(kernel, delta_batch(case, dtype, CPU, state_dtype), times=10 if dtype == torch.float32 else 2)


def test_in_bfloat16_it_is_as_near_to_the_answer_as_the_reference(exact_bfloat16):
    """Over several chunks, with heads as long as Qwen3-Next's: up to twice its error, in outputs and in states."""
    case = DeltaCase("", (Request(300), Request(130, has_state=False)), 1, 2, 128, 128)
    found, reference = (delta_batch(case, torch.bfloat16, CPU) for _ in range(2))
    exact = found.widened()
    found.run(kernel_of(case, torch.bfloat16))
    reference.run(OneByOne(gated_delta_rule))
    exact.run(OneByOne(gated_delta_rule))

    def errors(it):
        kept = (it.cache.tensors[1] - exact.cache.tensors[1]).nan_to_num()
        return [x.float().square().mean().sqrt().item() for x in (it.out - exact.out, kept)]

    for ours, theirs in zip(errors(found), errors(reference), strict=True):
        assert ours <= 2 * theirs


class Allocated(TorchDispatchMode):
    """Counts the bytes of tensors that are made empty."""

    total = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if "empty" in func.__name__:
            self.total += result.nbytes
        return result


def test_memory_profiling_knows_what_prompts_need_beside_their_outputs():
    case = DeltaCase("", (Request(200, has_state=False),))
    kernel, inputs = kernel_of(case, torch.float16), delta_batch(case, torch.float16, CPU)
    with Allocated() as allocated:
        inputs.run(kernel)
    assert allocated.total <= kernel.scratch_bytes(200) <= 2 * allocated.total
