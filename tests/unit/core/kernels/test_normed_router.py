"""A norm and the router behind it in one kernel, against float64."""

from __future__ import annotations

import pytest
import torch

from atom_core.kernels import kernel_set
from atom_core.kernels.fp8_block_linear.quantize import quantize_groups
from atom_core.kernels.fp8_inputs import InputForm
from atom_core.kernels.fp8_linear.reference import E4M3
from atom_core.kernels.normed_linear import Operands
from atom_core.kernels.normed_router import NORMED_ROUTER, NormedRouterSpec
from atom_core.kernels.normed_router.triton_kernel import TritonNormedRouter
from atom_core.kernels.rms_norm.reference import rms_norm
from atom_core.kernels.select import Target

EPS = 1e-5


def operands(tokens, num_experts, hidden, dtype, *, bias=True, wide=False):
    generator = torch.Generator().manual_seed(0)

    def randn(*shape):
        return torch.randn(*shape, generator=generator)

    given = torch.full((tokens, hidden + 3), float("nan"), dtype=dtype)  # a gap behind each row
    given[:, :hidden] = 3 * randn(tokens, hidden)
    weight = (randn(num_experts, hidden) / hidden**0.5).to(torch.float32 if wide else dtype)
    router = Operands(weight, randn(num_experts).to(weight.dtype) if bias else None, float32_result=not wide)
    return given[:, :hidden], randn(hidden).to(dtype), router


def exact(x, norm, router):
    normed = rms_norm(x.double(), norm.double(), EPS, None)[0]
    return normed, normed @ router.weight.double().T + (0.0 if router.bias is None else router.bias.double())


@pytest.mark.parametrize("num_experts", [1, 8, 60, 128, 129, 384, 528])
@pytest.mark.parametrize("tokens", [1, 2, 16])
def test_it_is_each_op_by_itself(num_experts, tokens):
    x, norm, router = operands(tokens, num_experts, 40, torch.float32, bias=num_experts > 8)
    before = x.clone()
    normed, logits = TritonNormedRouter(overlap=False)(x, norm, EPS, router)
    assert torch.equal(x, before)
    for found, wanted in zip((normed, logits), exact(x, norm, router), strict=True):
        torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("hidden", [1024, 1025, 2880])
@pytest.mark.parametrize("wide", [False, True], ids=["router in the model's dtype", "router in float32"])
@pytest.mark.parametrize("norm_dtype", [torch.float16, torch.float32], ids=str)
def test_any_width(hidden, wide, norm_dtype):
    x, norm, router = operands(3, 9, hidden, torch.float16, wide=wide)
    norm = norm.to(norm_dtype)
    normed, logits = TritonNormedRouter(overlap=False)(x, norm, EPS, router)
    assert normed.dtype == torch.float16
    assert logits.dtype == torch.float32
    wanted_normed, wanted = exact(x, norm, router)
    torch.testing.assert_close(normed.double(), wanted_normed, rtol=1e-3, atol=1e-6)
    torch.testing.assert_close(logits.double(), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("hidden", [72, 256, 640, 1000])
@pytest.mark.parametrize("num_outputs", [1, 3, 64])
@pytest.mark.parametrize("tokens", [2, 16])
@pytest.mark.usefixtures("exact_fp8_casts")
def test_it_quantises_as_the_norm_by_itself(hidden, num_outputs, tokens):
    x, norm, gates = operands(tokens, num_outputs, hidden, torch.bfloat16, bias=False)
    kernel = TritonNormedRouter(overlap=False)
    normed, wanted_gates = kernel(x, norm, EPS, gates)
    quantized, found_gates = kernel.quantized(x, norm, EPS, gates, InputForm(E4M3, group=128))
    wanted, wanted_scales = quantize_groups(normed, E4M3, overlap=False, group=128)
    assert torch.equal(found_gates, wanted_gates)
    assert torch.equal(quantized.values.view(torch.uint8), wanted.view(torch.uint8))
    assert torch.equal(quantized.scales, wanted_scales)


def test_logits_are_in_the_models_dtype_unless_they_are_to_be_wider():
    x, norm, router = operands(4, 5, 64, torch.float16)
    _, logits = TritonNormedRouter(overlap=False)(x, norm, EPS, router._replace(float32_result=False))
    assert logits.dtype == torch.float16
    torch.testing.assert_close(logits.double(), exact(x, norm, router)[1], rtol=2e-3, atol=1e-3)


def test_who_runs_it():
    spec = NormedRouterSpec((("rms_norm", "triton"), ("linear", "triton")))
    assert kernel_set(Target("cpu", "x86_64")).chosen(NORMED_ROUTER, spec) == "separate"
    nvidia = kernel_set(Target("cuda", "sm90"))
    for quantized in ("fp8_linear", "fp8_block_linear", "mxfp4_linear"):
        other = NormedRouterSpec((("rms_norm", "triton"), (quantized, "triton")))
        assert nvidia.chosen(NORMED_ROUTER, other) == "separate"
    assert nvidia.chosen(NORMED_ROUTER, spec) == "triton"
    assert nvidia.chosen(NORMED_ROUTER, NormedRouterSpec((("linear", "torch"),))) == "separate"
