"""Mixtures of experts in FP8 compile for each GPU."""

from __future__ import annotations

import pytest
import torch

from atom_core.kernels.experts import hopper as hopper_experts_kernel
from atom_core.kernels.fp8_block_linear import quantize as groups_kernel
from atom_core.kernels.fp8_experts import Fp8ExpertsSpec, Fp8ExpertWeights
from atom_core.kernels.fp8_experts import few_tokens as few_fp8_kernel
from atom_core.kernels.fp8_experts import hopper as hopper_fp8_kernel
from atom_core.kernels.fp8_experts import many_tokens as many_fp8_kernel
from atom_core.kernels.fp8_experts import triton_kernel as fp8_experts_kernel
from tests.contract.triton_compiles.compiling import (
    GPUS,
    SORTING,
    WITH_SHARED,
    Gpu,
    compile_launch,
    every_gpu,
    keep,
    zeros,
)

FEW_FP8 = [(few_fp8_kernel, name) for name in ("_gate_up_of_one", "_down_of_one", "_of_expert")]


def fp8_experts(
    hidden: int, block: bool, gpu: Gpu, count: int = 16, top_k: int = 8
) -> tuple[fp8_experts_kernel.TritonFp8Experts, Fp8ExpertWeights]:
    """A layer of them."""
    groups = -(-hidden // 128)
    scales = ((12, groups), (groups, 6)) if block else ((1536,), (hidden,))
    wide, narrow = (torch.ones(count, *shape) for shape in scales)
    gate_up, down = (
        torch.empty(count, *shape, dtype=torch.uint8).view(torch.float8_e4m3fn)
        for shape in ((1536, hidden), (hidden, 768))
    )
    spec = Fp8ExpertsSpec(0, count, hidden, 768, top_k, "silu", block, torch.bfloat16, total=count)
    kernel = fp8_experts_kernel.TritonFp8Experts(spec, gpu.device, gpu.nvidia)
    return kernel, Fp8ExpertWeights(gate_up, wide, down, narrow)


@every_gpu
@pytest.mark.parametrize("hidden", [2048, 200])
@pytest.mark.parametrize("block", [False, True], ids=["a scale a row", "a scale a block"])
@pytest.mark.parametrize("tokens", [1, 16, 20, 40, 100, 3000])
def test_fp8_experts_compile(monkeypatch, tokens, block, hidden, gpu):
    kept = keep(monkeypatch, *FEW_FP8, (many_fp8_kernel, "_multiply"))
    keep(monkeypatch, *SORTING, (groups_kernel, "_quantize_groups"))
    run, layer = fp8_experts(hidden, block, gpu)
    experts = torch.zeros(tokens, 8, dtype=torch.int32)
    run.add(zeros(tokens, hidden), torch.zeros(tokens, 8), experts, layer, zeros(tokens, hidden))
    launched = kept()
    assert len(launched) == 2
    for kernel, launch in launched:
        compile_launch(kernel, launch, gpu)


@pytest.mark.parametrize(("count", "top_k"), [(16, 8), WITH_SHARED.values()])
@pytest.mark.parametrize("block", [False, True], ids=["a scale a row", "a scale a block"])
@pytest.mark.parametrize("tokens", [2, 16, 20, 40])
def test_fp8_experts_of_few_routed_tokens_compile_for_hopper(monkeypatch, tokens, block, count, top_k):
    gpu = GPUS[-1]
    kept = keep(monkeypatch, (hopper_fp8_kernel, "expert_rows_fp8_hopper"))
    quantised = keep(monkeypatch, (groups_kernel, "_quantize_groups"))
    keep(monkeypatch, *SORTING)
    for module in (few_fp8_kernel, fp8_experts_kernel):
        monkeypatch.setattr(module, "on_hopper", lambda device: True)
    run, layer = fp8_experts(2048, block, gpu, count, top_k)
    experts = torch.zeros(tokens, top_k, dtype=torch.int32)
    run.add(zeros(tokens, 2048), torch.zeros(tokens, top_k), experts, layer, zeros(tokens, 2048))
    launched = kept()
    assert len(launched) == 2
    # In blocks gate and up quantise what they leave for down.
    assert len(quantised()) == (1 if block else 2)
    gate_up, down = (dict(zip(kernel.arg_names, launch.arguments, strict=False)) for kernel, launch in launched)
    if block:
        assert down["x"] is gate_up["quantized"]
        assert down["x_scales"] is gate_up["out_scales"]
        assert gate_up["arrivals"] is quantised()[0][1].constants["cleared"]
        # Six groups of the intermediate result of each block; where they are not sorted each routed token has a block.
        blocks = tokens * top_k if gate_up["slots"] is None else len(gate_up["block_experts"])
        assert len(gate_up["arrivals"]) == 6 * blocks
    for kernel, launch in launched:
        compile_launch(kernel, launch, gpu)


@pytest.mark.parametrize("hidden", [2048, 2176])
@pytest.mark.parametrize("block", [False, True], ids=["a scale a row", "a scale a block"])
def test_fp8_experts_of_many_tokens_compile_for_hopper(monkeypatch, block, hidden):
    gpu = GPUS[-1]
    kept = keep(monkeypatch, (hopper_experts_kernel, "grouped_rows_hopper"))
    keep(monkeypatch, *SORTING, (groups_kernel, "_quantize_groups"))
    monkeypatch.setattr(many_fp8_kernel, "on_hopper", lambda device: True)
    run, layer = fp8_experts(hidden, block, gpu)
    experts = torch.zeros(3000, 8, dtype=torch.int32)
    run.add(zeros(3000, hidden), torch.zeros(3000, 8), experts, layer, zeros(3000, hidden))
    launched = kept()
    assert len(launched) == 2
    for kernel, launch in launched:
        compile_launch(kernel, launch, gpu)


@every_gpu
@pytest.mark.parametrize("block", [False, True], ids=["a scale a row", "a scale a block"])
def test_fp8_experts_of_one_token_compile_behind_a_norm(monkeypatch, block, gpu):
    kept = keep(monkeypatch, *FEW_FP8)
    run, layer = fp8_experts(2048, block, gpu)
    chosen = torch.zeros(1, 8), torch.zeros(1, 8, dtype=torch.int32)
    run.add_after_norm(zeros(1, 2048), zeros(2048), 1e-6, *chosen, layer)
    launched = kept()
    assert len(launched) == 2
    for kernel, launch in launched:
        compile_launch(kernel, launch, gpu)


@every_gpu
@pytest.mark.parametrize("block", [False, True], ids=["a scale a row", "a scale a block"])
@pytest.mark.parametrize("tokens", [1, 16])
def test_fp8_experts_compile_with_a_shared_one(monkeypatch, tokens, block, gpu):
    kept = keep(monkeypatch, *FEW_FP8)
    keep(monkeypatch, *SORTING, (groups_kernel, "_quantize_groups"))
    run, layer = fp8_experts(2048, block, gpu, **WITH_SHARED)
    chosen = torch.zeros(tokens, 9), torch.zeros(tokens, 9, dtype=torch.int32)
    run.add(zeros(tokens, 2048), *chosen, layer, zeros(tokens, 2048))
    launched = kept()
    assert len(launched) == 2
    for kernel, launch in launched:
        compile_launch(kernel, launch, gpu)
