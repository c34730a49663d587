"""Mixtures of experts in 16 bits compile for each GPU."""

from __future__ import annotations

import pytest
import torch

from atom_core.kernels.experts import ExpertsSpec, ExpertWeights
from atom_core.kernels.experts import few_routed_tokens_hopper as few_routed_tokens_kernel
from atom_core.kernels.experts import few_tokens as few_experts_kernel
from atom_core.kernels.experts import few_tokens_hopper as few_hopper_kernel
from atom_core.kernels.experts import grouped as grouped_kernel
from atom_core.kernels.experts import hopper as hopper_experts_kernel
from atom_core.kernels.experts import routed_tokens_hopper as routed_tokens_kernel
from atom_core.kernels.experts import triton_kernel as experts_kernel
from tests.contract.triton_compiles.compiling import GPUS, SORTING, WITH_SHARED, compile_launch, every_gpu, keep, zeros

FEW = [(few_experts_kernel, name) for name in ("_gate_up_of_one", "_down_of_one", "_of_expert")]

#: Whether the kernel has moved the weights' numbers, as on Hopper.
moved = pytest.mark.parametrize("blocked", [False, True], ids=["as loaded", "blocked layout"])


def plain_experts(spec, overlap, blocked=False):
    """The kernel, its weights adopted or not."""
    kernel = experts_kernel.TritonExperts(spec, overlap)
    kernel.blocked = blocked
    return kernel


@every_gpu
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "with biases"])
@pytest.mark.parametrize(("tokens", "launches"), [(1, 2), (2, 3), (16, 3), (20, 4), (40, 4), (100, 4), (3000, 6)])
def test_experts_compile(monkeypatch, tokens, launches, bias, gpu):
    kernels = [*FEW, (grouped_kernel, "_multiply"), *SORTING]
    kept = keep(monkeypatch, *kernels)
    spec = ExpertsSpec(0, 16, 2048, 768, 8, "clamped_swiglu" if bias else "silu", bias, torch.bfloat16)
    layer = ExpertWeights(
        torch.empty(16, 1536, 2048, dtype=torch.bfloat16),
        torch.empty(16, 2048, 768, dtype=torch.bfloat16),
        zeros(16, 1536) if bias else None,
        zeros(16, 2048) if bias else None,
    )
    experts = torch.zeros(tokens, 8, dtype=torch.int32)
    experts_kernel.TritonExperts(spec, gpu.nvidia)(zeros(tokens, 2048), torch.zeros(tokens, 8), experts, layer)
    launched = kept()
    assert len(launched) == launches
    for kernel, launch in launched:
        compile_launch(kernel, launch, gpu)


@moved
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "with biases"])
@pytest.mark.parametrize(
    ("size", "tokens", "tiles"),
    [
        (768, 2, [(128, 3), (128, 5)]),
        (768, 16, [(128, 5), (128, 5)]),
        (1408, 4, [(128, 3), (128, 5)]),
        (704, 8, [(128, 5), (64, 9)]),
        (64, 8, [(128, 5), (64, 2)]),
        (1040, 8, [(128, 5), (64, 5)]),
    ],
)
def test_experts_of_few_tokens_compile_for_hopper(monkeypatch, size, tokens, tiles, bias, blocked):
    kept = keep(monkeypatch, (few_experts_kernel, "_of_expert"), (few_hopper_kernel, "down_of_few_hopper"))
    keep(monkeypatch, *SORTING)
    monkeypatch.setattr(few_experts_kernel, "on_hopper", lambda device: True)
    monkeypatch.setattr(few_hopper_kernel, "multiprocessors", lambda device: 132)
    spec = ExpertsSpec(0, 16, 2048, size, 8, "silu", bias, torch.bfloat16)
    biases = (zeros(16, 2 * size), zeros(16, 2048)) if bias else ()
    layer = ExpertWeights(zeros(16, 2 * size, 2048), zeros(16, 2048, size), *biases)
    chosen = torch.zeros(tokens, 8), torch.zeros(tokens, 8, dtype=torch.int32)
    plain_experts(spec, True, blocked)(zeros(tokens, 2048), *chosen, layer)
    launched = kept()
    constants = [launch.constants for _, launch in launched]
    assert [(it.get("BLOCK_K") or it["COLUMNS"], it["STAGES"]) for it in constants] == tiles
    for kernel, launch in launched:
        compile_launch(kernel, launch, GPUS[-1])


@moved
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "with biases"])
def test_experts_of_few_routed_tokens_compile_for_hopper(monkeypatch, bias, blocked):
    tokens, gpu = 20, GPUS[-1]
    kept = keep(monkeypatch, (few_routed_tokens_kernel, "few_routed_tokens_hopper"))
    keep(monkeypatch, *SORTING)
    monkeypatch.setattr(grouped_kernel, "on_hopper", lambda device: True)
    spec = ExpertsSpec(0, 16, 2048, 768, 8, "clamped_swiglu" if bias else "silu", bias, torch.bfloat16)
    biases = (zeros(16, 1536), zeros(16, 2048)) if bias else (None, None)
    layer = ExpertWeights(zeros(16, 1536, 2048), zeros(16, 2048, 768), *biases)
    chosen = torch.zeros(tokens, 8), torch.zeros(tokens, 8, dtype=torch.int32)
    run = plain_experts(spec, True, blocked)
    run.add(zeros(tokens, 2048), *chosen, layer, zeros(tokens, 2048))
    launched = kept()
    assert len(launched) == 2
    for kernel, launch in launched:
        compiled = compile_launch(kernel, launch, gpu)
        # One wait in the loop and one behind it: a compiler that waits for each product has more.
        assert compiled.asm["ptx"].count("wgmma.wait_group") == 2


@moved
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("shared", "tokens", "block", "bias"),
    [
        (0, 40, 32, False),
        (0, 40, 32, True),
        (0, 100, 64, True),
        (2, 20, 16, False),
        (2, 33, 32, False),
        (2, 64, 32, False),
        (2, 66, 64, False),
        (2, 256, 64, False),
        (2, 700, 128, False),
    ],
)
def test_experts_of_more_routed_tokens_compile_for_hopper(monkeypatch, shared, tokens, block, bias, dtype, blocked):
    """Blocks of up to 64 routed tokens, larger ones where tokens share experts: each block reads their weights."""
    kept = keep(
        monkeypatch,
        (few_routed_tokens_kernel, "few_routed_tokens_hopper"),
        (routed_tokens_kernel, "routed_tokens_hopper"),
        (hopper_experts_kernel, "grouped_rows_hopper"),
    )
    keep(monkeypatch, *SORTING)
    monkeypatch.setattr(grouped_kernel, "on_hopper", lambda device: True)
    count, top_k = (66, 8) if shared else (16, 8)
    activation = "clamped_swiglu" if bias else "silu"
    spec = ExpertsSpec(0, count, 2048, 704, top_k, activation, bias, dtype, count, shared)
    biases = (torch.empty(count, 1408, dtype=dtype), torch.empty(count, 2048, dtype=dtype)) if bias else (None, None)
    weights = torch.empty(count, 1408, 2048, dtype=dtype), torch.empty(count, 2048, 704, dtype=dtype)
    chosen = torch.zeros(tokens, top_k), torch.zeros(tokens, top_k, dtype=torch.int32)
    run = plain_experts(spec, True, blocked)
    x = torch.empty(tokens, 2048, dtype=dtype)
    run.add(x, *chosen, ExpertWeights(*weights, *biases), torch.empty_like(x))
    launched = kept()
    name = {16: "few_routed_tokens_hopper", 128: "grouped_rows_hopper"}.get(block, "routed_tokens_hopper")
    assert [kernel.__name__ for kernel, _ in launched] == [name] * 2
    for kernel, launch in launched:
        if name == "routed_tokens_hopper":
            assert launch.constants["TOKENS"] == block
            compiled = compile_launch(kernel, launch, GPUS[-1])
            # Three such programs, and what is set aside for each, share a multiprocessor's 228 KiB.
            assert 3 * (compiled.metadata.shared + 1024) <= 228 * 1024
            # A wait in the loop for all and one for half of the block: a compiler that waits for each has more.
            assert compiled.asm["ptx"].count("wgmma.wait_group") == 2


def one_token_after_a_norm(monkeypatch, size, gpu, blocked=False):
    """Compile its experts' launches."""
    kept = keep(monkeypatch, *FEW)
    spec = ExpertsSpec(0, 16, 2048, size, 8, "silu", False, torch.bfloat16)
    layer = ExpertWeights(
        torch.empty(16, 2 * size, 2048, dtype=torch.bfloat16), torch.empty(16, 2048, size, dtype=torch.bfloat16)
    )
    chosen = torch.zeros(1, 8), torch.zeros(1, 8, dtype=torch.int32)
    plain_experts(spec, gpu.nvidia, blocked).add_after_norm(zeros(1, 2048), zeros(2048), 1e-6, *chosen, layer)
    for kernel, launch in kept():
        compile_launch(kernel, launch, gpu)


@every_gpu
@pytest.mark.parametrize("size", [768, 1408])
def test_experts_of_one_token_compile_behind_a_norm(monkeypatch, size, gpu):
    one_token_after_a_norm(monkeypatch, size, gpu)


def test_experts_of_one_token_compile_for_tiles_that_lie_together(monkeypatch):
    one_token_after_a_norm(monkeypatch, 1408, GPUS[-1], blocked=True)


@moved
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "with biases"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_experts_of_many_tokens_compile_for_hopper(monkeypatch, dtype, bias, blocked):
    kept = keep(monkeypatch, (hopper_experts_kernel, "grouped_rows_hopper"))
    keep(monkeypatch, *SORTING)
    monkeypatch.setattr(grouped_kernel, "on_hopper", lambda device: True)
    spec = ExpertsSpec(0, 16, 2880, 704, 8, "clamped_swiglu" if bias else "silu", bias, dtype)
    layer = ExpertWeights(
        torch.empty(16, 1408, 2880, dtype=dtype),
        torch.empty(16, 2880, 704, dtype=dtype),
        torch.empty(16, 1408, dtype=dtype) if bias else None,
        torch.empty(16, 2880, dtype=dtype) if bias else None,
    )
    chosen = torch.zeros(3000, 8), torch.zeros(3000, 8, dtype=torch.int32)
    plain_experts(spec, True, blocked)(torch.empty(3000, 2880, dtype=dtype), *chosen, layer)
    launched = kept()
    assert len(launched) == 2
    for kernel, launch in launched:
        compile_launch(kernel, launch, GPUS[-1])


@every_gpu
@pytest.mark.parametrize("tokens", [1, 16, 64, 256])
def test_experts_compile_with_a_shared_one(monkeypatch, tokens, gpu):
    kept = keep(monkeypatch, *FEW, (grouped_kernel, "_multiply"), *SORTING)
    count, top_k = WITH_SHARED.values()
    spec = ExpertsSpec(0, count, 2048, 768, top_k, "silu", False, torch.bfloat16)
    layer = ExpertWeights(
        torch.empty(count, 1536, 2048, dtype=torch.bfloat16), torch.empty(count, 2048, 768, dtype=torch.bfloat16)
    )
    chosen = torch.zeros(tokens, top_k), torch.zeros(tokens, top_k, dtype=torch.int32)
    experts_kernel.TritonExperts(spec, gpu.nvidia)(zeros(tokens, 2048), *chosen, layer)
    launched = kept()
    assert len(launched) == (2 if tokens == 1 else 3 if tokens == 16 else 4)
    for kernel, launch in launched:
        compile_launch(kernel, launch, gpu)
