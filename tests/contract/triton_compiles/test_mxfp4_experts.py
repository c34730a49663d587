"""Mixtures of experts in MXFP4 compile for each GPU."""

from __future__ import annotations

import pytest
import torch

from atom_core.kernels.experts import hopper as hopper_experts_kernel
from atom_core.kernels.mxfp4_experts import Mxfp4ExpertsSpec, Mxfp4Weights, empty_scales
from atom_core.kernels.mxfp4_experts import hopper as hopper_mxfp4_kernel
from atom_core.kernels.mxfp4_experts import many_tokens as many_mxfp4_kernel
from atom_core.kernels.mxfp4_experts import triton_kernel as mxfp4_kernel
from atom_core.kernels.mxfp4_linear import inputs as inputs_kernel
from tests.contract.triton_compiles.compiling import GPUS, SORTING, compile_launch, every_gpu, keep, zeros


def in_mxfp4_experts(count: int, size: int, hidden: int) -> Mxfp4Weights:
    """Zeros, with biases."""
    return Mxfp4Weights(
        torch.zeros(count, 2 * size, hidden // 2, dtype=torch.uint8),
        empty_scales(count, 2 * size, hidden),
        torch.zeros(count, hidden, size // 2, dtype=torch.uint8),
        empty_scales(count, hidden, size),
        zeros(count, 2 * size),
        zeros(count, hidden),
    )


@every_gpu
@pytest.mark.parametrize(("tokens", "launches"), [(1, 2), (40, 4), (200, 4), (400, 4), (3000, 6)])
def test_experts_in_mxfp4_compile(monkeypatch, tokens, launches, gpu):
    kernels = [(mxfp4_kernel, name) for name in ("_gate_up", "_down", "_multiply")]
    kept = keep(monkeypatch, *kernels, *SORTING)
    hidden, size, count = 2880, 2880, 32
    spec = Mxfp4ExpertsSpec(0, count, hidden, size, 4, "clamped_swiglu", True, torch.bfloat16, rounded_inputs=True)
    keep(monkeypatch, (inputs_kernel, "_prepare"))
    layer = in_mxfp4_experts(count, size, hidden)
    experts = torch.zeros(tokens, 4, dtype=torch.int32)
    x, weights = zeros(tokens, hidden), torch.zeros(tokens, 4)
    mxfp4_kernel.TritonMxfp4Experts(spec, gpu.nvidia)(x, weights, experts, layer)
    mxfp4_kernel.TritonMxfp4Experts(spec, gpu.nvidia).add(x, weights, experts, layer, zeros(tokens, hidden))
    launched = kept()
    assert len(launched) == 2 * launches
    for kernel, launch in launched:
        compile_launch(kernel, launch, gpu)


def compile_mxfp4_for_hopper(
    monkeypatch: pytest.MonkeyPatch, tokens: int, hidden: int, size: int, top_k: int, *, bias: bool, rounded: bool
) -> None:
    """Both products of a layer of 32 experts."""
    gpu = GPUS[-1]
    widened = [(many_mxfp4_kernel, "_widen"), (hopper_experts_kernel, "grouped_rows_hopper")]
    kept = keep(monkeypatch, (hopper_mxfp4_kernel, "expert_rows_hopper"), *widened)
    keep(monkeypatch, *SORTING, (inputs_kernel, "_prepare"))
    monkeypatch.setattr(mxfp4_kernel, "on_hopper", lambda device: True)
    activation = "clamped_swiglu" if bias else "silu"
    spec = Mxfp4ExpertsSpec(0, 32, hidden, size, top_k, activation, bias, torch.bfloat16, rounded_inputs=rounded)
    layer = in_mxfp4_experts(32, size, hidden)
    if not bias:
        layer = Mxfp4Weights(*layer[:4])
    chosen = torch.zeros(tokens, top_k), torch.zeros(tokens, top_k, dtype=torch.int32)
    mxfp4_kernel.TritonMxfp4Experts(spec, True)(zeros(tokens, hidden), *chosen, layer)
    launched = kept()
    if tokens == 7000 and size % 64 == 0:
        # Eight experts at a time for gate and up, sixteen for down.
        assert [it.__name__ for it, _ in launched] == ["_widen"] * 6 + ["grouped_rows_hopper"] * 6
    else:
        assert [it.__name__ for it, _ in launched] == ["expert_rows_hopper"] * 2
    for kernel, launch in launched:
        compile_launch(kernel, launch, gpu)


@pytest.mark.parametrize("rounded", [False, True], ids=["as they are", "rounded"])
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "with biases"])
@pytest.mark.parametrize(("hidden", "size"), [(2880, 2880), (2880, 1440)])
@pytest.mark.parametrize("tokens", [1, 9, 40, 200, 600, 3000, 7000])
def test_experts_in_mxfp4_compile_for_hopper(monkeypatch, tokens, hidden, size, bias, rounded):
    compile_mxfp4_for_hopper(monkeypatch, tokens, hidden, size, 4, bias=bias, rounded=rounded)


@pytest.mark.parametrize("tokens", [1, 9, 40, 100, 300])
def test_nine_experts_in_mxfp4_compile_for_hopper(monkeypatch, tokens):
    compile_mxfp4_for_hopper(monkeypatch, tokens, 2048, 768, 9, bias=False, rounded=True)
