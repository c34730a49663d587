"""Products with FP8 weights on this GPU, against float64, with NaN around whatever must not be read."""

from __future__ import annotations

import pytest
import torch

from atom_core.kernels import kernel_set
from atom_core.kernels.fp8_linear import FP8_LINEAR, Fp8LinearSpec
from atom_core.kernels.fp8_linear.quantize import quantize
from atom_core.kernels.fp8_linear.reference import E4M3, quantize_input
from atom_core.kernels.fp8_linear.scaled_mm import FNUZ, ScaledMm, dtype_of
from atom_core.kernels.fp8_linear.triton_kernel import TritonFp8Linear
from atom_core.kernels.gated_activation.reference import gated_activation
from atom_core.kernels.linear.tiles import MAX_ROWS
from atom_core.kernels.normed_linear import Operands
from atom_core.kernels.normed_linear.triton_kernel import TritonNormedLinear
from atom_core.kernels.rms_norm.reference import rms_norm
from atom_core.kernels.select import Target
from atom_core.kernels.triton_support import overlaps

GPU = torch.device("cuda")
TARGET = Target.of(GPU)
OVERLAP = overlaps(TARGET)
FP8 = dtype_of(TARGET)
KERNELS = {"triton": lambda: TritonFp8Linear(TARGET, OVERLAP), "scaled_mm": lambda: ScaledMm(TARGET)}
every_kernel = pytest.mark.parametrize("name", KERNELS)
every_dtype = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
every_scale = pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static"])

#: As a share of the answer's largest magnitude. FP8 products sum in fewer bits than float32 (some 13 on Hopper), which
#: over K of these sizes shows in the third digit.
FEWER_BITS = 2**-6
#: One row is summed in float16 by eights and in float32 beyond.
ONE_ROW = 2**-8

SHAPES = [(6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288), (4096, 1024), (1024, 2048), (1024, 3072)]
EDGES = [(16, 16), (48, 80), (112, 1008), (528, 4112)]


def operands(rows, out_features, in_features, dtype, static=False):
    """Rows of x have a gap of NaN after them, as a slice of a wider buffer has."""
    torch.manual_seed(0)
    wide = torch.full((rows, in_features + 8), float("nan"), dtype=dtype, device=GPU)
    wide[:, :in_features] = torch.randn(rows, in_features, device=GPU)
    weight = torch.randn(out_features, in_features, device=GPU).mul_(100).clamp_(-448, 448).to(E4M3)
    weight.view(torch.uint8).view(-1)[::37] = 0x80  # minus zeros
    weight_scale = (torch.rand(out_features, device=GPU) + 0.5) / (100 * in_features**0.5)
    input_scale = torch.full((1,), 0.005, device=GPU) if static else None
    bias = torch.randn(out_features, device=GPU).to(dtype)
    return wide[:, :in_features], weight, weight_scale, input_scale, bias


def expected(x, weight, weight_scale, input_scale, bias, name="triton"):
    """float64; one row stays as it is in the kernel of ours for it."""
    if len(x) > 1 or name != "triton" or TARGET.kind != "cuda":
        stored, scale = quantize_input(x, input_scale)
        x = stored.double() * scale
    y = x.double() @ (weight.double() * weight_scale[:, None]).T
    return y if bias is None else y + bias.double()


def assert_close(found, wanted, tolerance):
    assert found.shape == wanted.shape
    atol = tolerance * wanted.abs().max().item() if wanted.numel() else 0.0
    torch.testing.assert_close(found.double(), wanted, rtol=tolerance, atol=atol)


@every_kernel
@every_scale
@every_dtype
@pytest.mark.parametrize(("out_features", "in_features"), SHAPES + EDGES)
@pytest.mark.parametrize("rows", [0, 1, 3, 8, 16, 17, 33, MAX_ROWS, MAX_ROWS + 1, 515])
@pytest.mark.parametrize("with_bias", [False, True])
def test_the_product(with_bias, rows, out_features, in_features, dtype, static, name):
    x, weight, weight_scale, input_scale, bias = operands(rows, out_features, in_features, dtype, static)
    bias = bias if with_bias else None
    wanted = expected(x, weight, weight_scale, input_scale, bias, name)
    kernel = KERNELS[name]()
    kernel.adopt(weight, weight_scale)
    found = kernel(x, weight, weight_scale, input_scale, bias)
    assert_close(found, wanted, ONE_ROW if rows == 1 and name == "triton" else FEWER_BITS)


@every_scale
@every_dtype
@pytest.mark.parametrize(("out_features", "in_features"), SHAPES + EDGES)
@pytest.mark.parametrize("rows", [1, 3, MAX_ROWS])
def test_norm_activation_and_residual_around_it(rows, out_features, in_features, dtype, static):
    x, weight, weight_scale, input_scale, bias = operands(rows, out_features, in_features, dtype, static)
    kernel = TritonFp8Linear(TARGET, OVERLAP)
    kernel.adopt(weight, weight_scale)
    norm = torch.rand(in_features, device=GPU).to(dtype)
    normed = rms_norm(x, norm, 1e-6, None)[0]
    wanted = gated_activation(expected(normed, weight, weight_scale, input_scale, bias).to(dtype), "silu")
    fused = TritonNormedLinear("silu", nvidia=TARGET.kind == "cuda", overlap=OVERLAP)
    layer = Operands(kernel.stored(weight), bias, weight_scale, input_scale)
    assert_close(fused(x, norm, 1e-6, layer), wanted.double(), 2 * FEWER_BITS)
    residual = torch.randn(rows, out_features, device=GPU).to(dtype)
    wanted = residual.double() + expected(x, weight, weight_scale, input_scale, bias)
    found = kernel.add(x, weight, weight_scale, input_scale, bias, residual)
    assert found is residual
    assert_close(found, wanted, FEWER_BITS)


@every_scale
@every_dtype
@pytest.mark.parametrize("size", [16, 1000, 4096, 12288, 29568])
@pytest.mark.parametrize("rows", [1, 17, 300])
def test_activations_are_quantised_as_the_reference_does(rows, size, dtype, static):
    x, _, _, input_scale, _ = operands(rows, 16, size, dtype, static)
    x[0, :2] = torch.tensor([9e3, -9e3], dtype=dtype)
    if rows > 1:
        x[1] = 0
    unit = 2 if FP8 == FNUZ else 1
    found, scales = quantize(x, input_scale, FP8, OVERLAP)
    wanted, wanted_scales = quantize_input(x, input_scale)
    assert torch.equal(unit * found.float(), wanted.float())
    assert torch.equal(scales, unit * unit * wanted_scales.expand(rows, 1))


def test_a_row_with_nan_is_nan_and_its_neighbours_are_not():
    x, weight, weight_scale, _, _ = operands(20, 48, 80, torch.bfloat16)
    x[3, 5] = float("nan")
    y = TritonFp8Linear(TARGET, OVERLAP)(x, weight, weight_scale, None, None)
    assert y[3].isnan().all()
    assert y[[0, 1, 2, 4, 19]].isfinite().all()


@every_kernel
@every_scale
@pytest.mark.parametrize("rows", [1, 3, 40, 100])
def test_it_runs_in_graphs_with_other_numbers_than_were_captured(rows, static, name):
    x, weight, weight_scale, input_scale, bias = operands(rows, 528, 4112, torch.bfloat16, static)
    kernel = KERNELS[name]()
    kernel.adopt(weight, weight_scale)
    other = torch.randn_like(x)
    wanted = kernel(other, weight, weight_scale, input_scale, bias)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = kernel(x, weight, weight_scale, input_scale, bias)
    x.copy_(other)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(found, wanted)


def test_it_is_one_op_to_a_compiler():
    _, weight, weight_scale, _, bias = operands(1, 96, 64, torch.bfloat16)
    kernel = TritonFp8Linear(TARGET, OVERLAP)
    kernel.adopt(weight, weight_scale)

    def body(x):
        return torch.nn.functional.silu(kernel(x, weight, weight_scale, None, bias)) * 2

    compiled = torch.compile(body, fullgraph=True, dynamic=True)
    for rows in (3, 100):
        x = torch.randn(rows, 64, device=GPU).to(torch.bfloat16)
        torch.testing.assert_close(compiled(x), body(x), rtol=2**-7, atol=2**-7)


def test_this_gpu_takes_triton():
    kernels = kernel_set(TARGET, with_aiter=False)
    kernels.select(FP8_LINEAR, Fp8LinearSpec(64, 32, False, torch.bfloat16, "dynamic"))
    assert kernels.choices()[0].implementation == "triton"
