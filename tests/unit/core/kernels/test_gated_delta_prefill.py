"""Gated DeltaNet of any batch under Triton's interpreter."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from atom_core.kernels import kernel_set
from atom_core.kernels.gated_delta_net import GATED_DELTA_NET, GatedDeltaNetSpec
from atom_core.kernels.gated_delta_net.reference import OneByOne, gated_delta_rule
from atom_core.kernels.select import Target
from tests.gated_delta_cases import PROMPT_CASES, DeltaCase, Request, check_delta, delta_batch, drafted

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


@pytest.mark.parametrize(
    ("case", "launches"),
    [
        (DeltaCase("decodes", (Request(1), Request(1, has_state=False)), decodes=2), ["decode"]),
        (DeltaCase("few tokens of prompts", (Request(8, has_state=False), Request(2))), ["decode"]),
        (DeltaCase("drafts", drafted(3, 3), columns=3, drafts=True, decodes=6), ["decode"]),
        (DeltaCase("a prompt behind a decode", (Request(1), Request(9)), decodes=1), ["decode", "chunks"]),
        (DeltaCase("a prompt", (Request(9),)), ["chunks"]),
    ],
    ids=str,
)
def test_requests_of_few_tokens_go_in_one_launch(monkeypatch, case, launches):
    from atom_core.kernels.gated_delta_net import triton_decode, triton_prefill

    kernel, made = kernel_of(case, torch.float32), []

    class Counted:
        def __init__(self, module, kernel, name):
            self.run, self.name = getattr(module, kernel), name
            monkeypatch.setattr(module, kernel, self)

        def __getitem__(self, grid):
            made.append(self.name)
            return self.run[grid]

    Counted(triton_decode, "_gated_delta_decode", "decode")
    Counted(triton_prefill, "carry", "chunks")
    check_delta(kernel, delta_batch(case, torch.float32, CPU))
    assert made == launches


@pytest.mark.parametrize(("dim", "width", "chosen"), [(128, 4, "triton"), (256, 4, "reference"), (128, 5, "reference")])
def test_what_it_does_not_support_the_reference_runs(dim, width, chosen):
    spec = GatedDeltaNetSpec(16, 32, dim, 128, width, torch.bfloat16, torch.float32)
    assert kernel_set(Target("cuda", "sm90")).chosen(GATED_DELTA_NET, spec) == chosen


def test_offsets_past_two_billion_elements(exact_bfloat16):
    """A prompt's last inputs, which the cache keeps: of 131,072 tokens of 16 over 48 heads they lie there."""
    inputs = delta_batch(DeltaCase("", (Request(200),)), torch.bfloat16, CPU)
    stride = 2**24
    assert 199 * stride > 2**31 > 63 * stride  # offsets within a chunk need not be as wide
    far = torch.empty(200 * stride, dtype=torch.bfloat16).as_strided(inputs.qkvz.shape, (stride, 1))
    inputs = replace(inputs, qkvz=far.copy_(inputs.qkvz))
    check_delta(kernel_of(DeltaCase("", ()), torch.bfloat16), inputs, times=2)


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


@pytest.mark.parametrize("requests", [(Request(200, has_state=False),), (Request(9),) * 8], ids=["one", "eight"])
def test_memory_profiling_knows_what_prompts_need_beside_their_outputs(requests):
    case = DeltaCase("", requests)
    kernel, inputs = kernel_of(case, torch.float16), delta_batch(case, torch.float16, CPU)
    with Allocated() as allocated:
        inputs.run(kernel)
    tokens = sum(it.tokens for it in requests)
    assert allocated.total <= kernel.scratch_bytes(tokens, len(requests)) <= 2 * allocated.total
    assert kernel.scratch_bytes(tokens, 1000) == kernel.scratch_bytes(tokens, tokens)
